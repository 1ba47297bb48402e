"""A checkpoint as if it had been made elsewhere or earlier: its record or its images, altered and signed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torpor.paths import Paths
from torpor.store import Object, Store


def alter_record(paths: Paths, session: str, alter: Callable[[dict[str, Any]], None]) -> None:
    """Alters the record of a session's only checkpoint."""
    with Store.open(paths.store, paths.site_key.read_bytes()) as store:
        manifest = store.manifest(*store.manifests(session)[-1])
        alter(manifest.record)
        with store.writer() as writer:
            writer.seal()
            store.delete(manifest.session, manifest.checkpoint)
            writer.commit(manifest)


def alter_image(paths: Paths, session: str, name: str, alter: Callable[[bytes], bytes]) -> None:
    """Alters one of CRIU's small images in a session's only checkpoint."""
    with Store.open(paths.store, paths.site_key.read_bytes()) as store:
        manifest = store.manifest(*store.manifests(session)[-1])
        stored = manifest.objects["images"]
        content = memoryview(bytearray(stored.size))
        store.read_into(stored.ids(), content, stored.lengths)
        names, pieces, offset = [], [], 0
        for one, size in msgspec.msgpack.decode(stored.meta, type=list[tuple[str, int]]):
            piece = bytes(content[offset : offset + size])
            pieces.append(alter(piece) if one == name else piece)
            names.append((one, len(pieces[-1])))
            offset += size
        with store.writer() as writer:
            lengths = [len(piece) for piece in pieces if piece]
            ids = [writer.put(memoryview(piece), [len(piece)])[0] for piece in pieces if piece]
            meta = msgspec.msgpack.encode(names)
            manifest.objects["images"] = Object(sum(lengths), b"".join(ids), lengths, meta)
            writer.seal()
            store.delete(manifest.session, manifest.checkpoint)
            writer.commit(manifest)
