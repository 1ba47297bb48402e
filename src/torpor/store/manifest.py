"""Manifests: what one checkpoint is made of, signed as a whole and committed last, under a name that must be new.

File: header (magic, format, key id, length of the body), body (MessagePack of `Manifest`), MAC (keyed BLAKE3 of both).
"""

from __future__ import annotations

import os
import struct
from hmac import compare_digest
from pathlib import Path
from typing import Any

import msgspec

from torpor.errors import IntegrityError, NewerFormat, NotFound, StoreError
from torpor.store import direct, pack
from torpor.store.keys import ID_BYTES, MAC_BYTES, Keys, mac
from torpor.store.layout import Layout, is_id

FORMAT = 1

_HEADER = struct.Struct("<8sI16sQ")
_MAGIC = b"TORPORMF"


class Object(msgspec.Struct):
    """One thing a checkpoint holds (a mapping, an image, a file): the chunks that make it up, one after another.

    `size` and `lengths` are bytes; `chunks` the 32-byte ids of the chunks, concatenated; `meta` opaque to the store.
    """

    size: int
    chunks: bytes
    lengths: list[int]
    meta: bytes = b""

    def ids(self) -> list[bytes]:
        """The chunk ids, one for each of `lengths`."""
        return [self.chunks[start : start + ID_BYTES] for start in range(0, len(self.chunks), ID_BYTES)]


class Manifest(msgspec.Struct, kw_only=True):
    """One checkpoint. `record` and the objects' `meta` are opaque to the store; times are seconds since the epoch."""

    format: int = FORMAT
    site: str
    key_id: str
    domain: str
    chunker: str
    cipher: str
    session: str
    checkpoint: str
    created: float
    parent: str | None = None
    record: dict[str, Any] = {}
    objects: dict[str, Object] = {}


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest, keys: Keys) -> bytes:
    """The signed file of a manifest. Raises StoreError when it contradicts itself."""
    fault = _contradiction(manifest)
    if manifest.format != FORMAT or manifest.key_id != keys.key_id.hex():
        fault = "its format or key id is not the store's"
    if fault:
        raise StoreError(f"The manifest of checkpoint {manifest.checkpoint} cannot be committed: {fault}.")
    body = _ENCODER.encode(manifest)
    head = _HEADER.pack(_MAGIC, FORMAT, keys.key_id, len(body))
    return head + body + mac(keys.manifest, head, body)


def read(layout: Layout, keys: Keys, session: str, checkpoint: str) -> Manifest:
    """A committed manifest, authenticated before it is parsed.

    Raises NotFound, IntegrityError (damaged, another site's key, not under its own name), NewerFormat, UsageError.
    """
    path = layout.manifest(session, checkpoint)
    try:
        with direct.opened(path, os.O_RDONLY) as fd, open(fd, "rb", closefd=False) as file:
            data = file.read()
    except FileNotFoundError as error:
        raise NotFound(f"There is no checkpoint {checkpoint} of session {session} in the store.") from error
    except OSError as error:
        raise direct.store_error(error, f"The manifest of checkpoint {checkpoint} cannot be read") from error
    manifest = _decode(data, checkpoint, keys)
    if (manifest.session, manifest.checkpoint) != (session, checkpoint):
        raise _damaged(checkpoint, f"it is that of checkpoint {manifest.checkpoint} of session {manifest.session}")
    return manifest


def link_new(layout: Layout, temporary: Path, manifest: Manifest) -> None:
    """Put a durable file under the manifest's name, which must be new, and make the name durable.

    Raises StoreError (also when the name is taken: the manifest there stays as it is).
    """
    path = layout.manifest(manifest.session, manifest.checkpoint)
    try:
        while True:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                os.link(temporary, path)
                break
            except FileNotFoundError:
                if not temporary.exists():
                    raise  # else the session's last checkpoint was deleted meanwhile, and its folder with it
        direct.sync_folder(path.parent)
        direct.sync_folder(layout.manifests)
    except FileExistsError as error:
        raise taken(manifest) from error
    except OSError as error:
        raise direct.store_error(error, f"The checkpoint {manifest.checkpoint} cannot be committed") from error


def taken(manifest: Manifest) -> StoreError:
    """The error for a manifest whose name is taken."""
    return StoreError(
        f"The checkpoint {manifest.checkpoint} of session {manifest.session} exists already.",
        safe="The one that exists was not touched.",
    )


def names(layout: Layout, session: str | None = None) -> list[tuple[str, str]]:
    """(session, checkpoint) of every committed manifest, sorted; unparsed, so that a damaged one hides no other."""
    if session is not None:
        folders = [layout.session(session)]
    else:
        folders = [path for path in layout.manifests.iterdir() if is_id(path.name)]
    return sorted((folder.name, name) for folder in folders for name in _listing(folder) if is_id(name))


def delete(layout: Layout, session: str, checkpoint: str) -> None:
    """Remove a manifest durably; it need not be readable. Raises NotFound, StoreError, UsageError."""
    path = layout.manifest(session, checkpoint)
    try:
        path.unlink()
        direct.sync_folder(path.parent)
        if not _listing(path.parent):
            path.parent.rmdir()
    except FileNotFoundError as error:
        raise NotFound(f"There is no checkpoint {checkpoint} of session {session} in the store.") from error
    except OSError as error:
        if not path.exists() and _listing(path.parent):
            return  # another checkpoint of the session was committed before its empty folder could be removed
        raise direct.store_error(error, f"The checkpoint {checkpoint} cannot be deleted") from error


def _decode(data: bytes, checkpoint: str, keys: Keys) -> Manifest:
    if len(data) < _HEADER.size + MAC_BYTES:
        raise _damaged(checkpoint, "it is cut short")
    magic, version, key_id, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise _damaged(checkpoint, "it does not begin like one")
    if version > FORMAT:
        raise NewerFormat(
            f"The manifest of checkpoint {checkpoint} has format {version}; this Torpor knows formats up to {FORMAT}.",
            safe="It was left as it is; other checkpoints can be used.",
            hint="Install the newer Torpor that wrote it.",
        )
    if key_id != keys.key_id:
        raise IntegrityError(
            f"The manifest of checkpoint {checkpoint} is signed with another site's key ({key_id.hex()}).",
            safe="Nothing of it was used; other checkpoints can be used.",
        )
    signed, signature = memoryview(data)[:-MAC_BYTES], data[-MAC_BYTES:]
    if len(signed) != _HEADER.size + length or not compare_digest(signature, mac(keys.manifest, signed)):
        raise _damaged(checkpoint, "its signature does not match")
    try:
        manifest = _DECODER.decode(signed[_HEADER.size :])
    except msgspec.DecodeError as error:
        raise _damaged(checkpoint, str(error)) from error
    fault = _contradiction(manifest)
    if fault:
        raise _damaged(checkpoint, fault)
    return manifest


def _contradiction(manifest: Manifest) -> str:
    for name, thing in manifest.objects.items():
        if len(thing.chunks) != ID_BYTES * len(thing.lengths):
            return f"the object {name} has not as many lengths as chunks"
        if any(not 0 < length <= pack.MAX_CHUNK for length in thing.lengths):
            return f"the object {name} has a chunk of an impossible length"
        if sum(thing.lengths) != thing.size:
            return f"the chunks of the object {name} do not make up its size"
    return ""


def _damaged(checkpoint: str, how: str) -> IntegrityError:
    return IntegrityError(
        f"The manifest of checkpoint {checkpoint} is damaged: {how}.",
        safe="Nothing of it was used; other checkpoints can be used.",
    )


def _listing(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
