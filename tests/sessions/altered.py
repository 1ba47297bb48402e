"""A checkpoint as if it had been made elsewhere or earlier: its record or its images, altered and signed again."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from torpor.paths import Paths
from torpor.store import Manifest, Object, Store, Writer


def alter(paths: Paths, session: str, change: Callable[[Manifest], None]) -> None:
    """Alters the manifest of a session's only checkpoint."""
    with Store.open(paths.store, paths.site_key.read_bytes()) as store:
        manifest = store.manifest(*store.manifests(session)[-1])
        change(manifest)
        with store.writer() as writer:
            _put_back(store, writer, manifest)


def alter_image(paths: Paths, session: str, name: str, change: Callable[[bytes], bytes]) -> None:
    """Alters one of CRIU's small images in a session's only checkpoint."""
    with Store.open(paths.store, paths.site_key.read_bytes()) as store:
        manifest = store.manifest(*store.manifests(session)[-1])
        stored = manifest.objects["images"]
        content = memoryview(bytearray(stored.size))
        store.read_into(stored.ids(), content, stored.lengths)
        names, pieces, offset = [], [], 0
        for one, size in msgspec.msgpack.decode(stored.meta, type=list[tuple[str, int]]):
            piece = bytes(content[offset : offset + size])
            pieces.append(change(piece) if one == name else piece)
            names.append((one, len(pieces[-1])))
            offset += size
        with store.writer() as writer:
            lengths = [len(piece) for piece in pieces if piece]
            ids = [writer.put(memoryview(piece), [len(piece)])[0] for piece in pieces if piece]
            manifest.objects["images"] = Object(sum(lengths), b"".join(ids), lengths, msgspec.msgpack.encode(names))
            _put_back(store, writer, manifest)


def _put_back(store: Store, writer: Writer, manifest: Manifest) -> None:
    writer.seal()
    store.delete(manifest.session, manifest.checkpoint)
    writer.commit(manifest)
