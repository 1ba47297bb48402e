"""Giving space back: packs of which no manifest needs a chunk any more, and what dead writers left in `incoming`."""

from __future__ import annotations

import os

from torpor.errors import IntegrityError, NewerFormat
from torpor.store import direct, layout, manifest, pack
from torpor.store.index import Index
from torpor.store.keys import Keys
from torpor.store.layout import Layout


def collect(layout_: Layout, keys: Keys, index: Index) -> int:
    """Remove packs without a live chunk; return how many bytes that freed.

    What is live is asked of the manifests and of the packs themselves, never of the index. Takes about 100 bytes of
    memory per live chunk. Raises Conflict (the store is in use), StoreError, and IntegrityError or NewerFormat when a
    manifest cannot be read: it might need any chunk, so nothing is removed.
    """
    with layout.exclusive(layout_):
        live = _live_chunks(layout_, keys)
        try:
            freed = sum(_remove(layout_.incoming, os.listdir(layout_.incoming)))
            index.refresh()
            dead = [name for name in os.listdir(layout_.packs) if _is_dead(layout_, keys, name, live)]
            index.forget(dead)
            return freed + sum(_remove(layout_.packs, dead))
        except OSError as error:
            raise direct.store_error(error, "The store cannot be collected") from error


def sweep(layout_: Layout) -> int:
    """Remove what dead writers left in `incoming`; return how many bytes that freed. Raises Conflict, StoreError."""
    with layout.exclusive(layout_):
        try:
            return sum(_remove(layout_.incoming, os.listdir(layout_.incoming)))
        except OSError as error:
            raise direct.store_error(error, "What a dead writer left cannot be removed") from error


def _live_chunks(layout_: Layout, keys: Keys) -> set[bytes]:
    live: set[bytes] = set()
    for session, checkpoint in manifest.names(layout_):
        try:
            made = manifest.read(layout_, keys, session, checkpoint)
        except (IntegrityError, NewerFormat) as error:
            raise type(error)(
                f"Nothing was collected, because it is not known which chunks a manifest needs. {error.message}",
                safe="Nothing was removed.",
                hint=f"If nobody can use checkpoint {checkpoint} of session {session}, remove it and collect again.",
            ) from error
        for thing in made.objects.values():
            live.update(thing.ids())
    return live


def _is_dead(layout_: Layout, keys: Keys, name: str, live: set[bytes]) -> bool:
    try:
        fd = pack.open_readable(layout_, name)
        try:
            entries = pack.read_contents(fd, name, keys).entries
        finally:
            os.close(fd)
    except (IntegrityError, NewerFormat):
        return False  # what it holds is unknown, and the index may still lead to whole chunks in it
    return not any(entry.id in live for entry in entries)


def _remove(folder: os.PathLike[str], names: list[str]) -> list[int]:
    sizes = []
    for name in names:
        path = os.path.join(folder, name)
        sizes.append(os.stat(path).st_size)
        os.unlink(path)
    return sizes
