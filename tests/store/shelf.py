"""What the store's tests make checkpoints of, and how they look at the files behind the store's back."""

from __future__ import annotations

import mmap
import random
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from torpor.store import Manifest, Object, Store, Writer

KEY = bytes(range(32))
PAGE = 4096
CHUNK = 4 * PAGE


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that no two chunks share."""
    return random.Random(seed).randbytes(size)


def cut(data: bytes, chunk: int = CHUNK) -> list[int]:
    """End offsets of the chunks of `data`."""
    return [*range(chunk, len(data), chunk), len(data)] if data else []


def put(writer: Writer, data: bytes, chunk: int = CHUNK) -> Object:
    """One object of at most one segment."""
    ends = cut(data, chunk)
    ids = writer.put(memoryview(data), ends)
    starts = [0, *ends[:-1]] if ends else []
    return Object(len(data), b"".join(ids), [end - start for start, end in zip(starts, ends, strict=True)])


def manifest(store: Store, session: str, checkpoint: str, objects: Mapping[str, Object]) -> Manifest:
    return Manifest(
        site="site",
        key_id=store.key_id,
        domain="site",
        chunker="fixed",
        cipher="none",
        session=session,
        checkpoint=checkpoint,
        created=1.0,
        record={"argv": ["python"], "pages": 7},
        objects=dict(objects),
    )


def save(store: Store, session: str, checkpoint: str, contents: Mapping[str, bytes], chunk: int = CHUNK) -> Manifest:
    """A committed and verified checkpoint that holds `contents`."""
    with store.writer() as writer:
        made = manifest(store, session, checkpoint, {name: put(writer, data, chunk) for name, data in contents.items()})
        writer.seal()
        writer.commit(made)
        writer.verify()
    return made


def load(store: Store, session: str, checkpoint: str) -> dict[str, bytes]:
    """What a checkpoint holds, read into fresh page-aligned memory."""
    return {name: read(store, thing) for name, thing in store.manifest(session, checkpoint).objects.items()}


def read(store: Store, thing: Object, *, shift: int = 0) -> bytes:
    """One object, read into memory that begins `shift` bytes after a page boundary."""
    memory = memoryview(mmap.mmap(-1, thing.size + shift + 1))[shift : shift + thing.size]
    store.read_into(thing.ids(), memory, thing.lengths)
    return bytes(memory)


def packs(folder: Path) -> list[Path]:
    return sorted((folder / "packs").iterdir())


def incoming(folder: Path) -> list[Path]:
    return sorted((folder / "incoming").iterdir())


def index_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"index-\d+\.db", path.name))


def forget_index(folder: Path) -> None:
    """As if the cache had never been; no store may be open."""
    for path in folder.glob("index-*"):
        path.unlink()


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Damage one byte of a file where it lies on the disk."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where the chunks of the first object of a pack begin in the pack."""
    padded = [-(-length // PAGE) * PAGE for length in lengths]
    return [PAGE, *(PAGE + end for end in accumulate(padded))][:-1]
