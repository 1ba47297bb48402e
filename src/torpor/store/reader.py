"""Chunks on their way back: few large reads, straight into place where alignment allows, and nothing unauthenticated.

A chunk that is not what its id says is read again, then looked for in other packs, then in packs that the index did not
know; only then is it an error.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from torpor.errors import IntegrityError, StoreError
from torpor.store import direct, pack
from torpor.store.audit import WINDOW_BYTES, Progress, scratch
from torpor.store.direct import PAGE, padded
from torpor.store.index import Index, Place
from torpor.store.keys import Keys
from torpor.store.layout import Layout
from torpor.store.manifest import Manifest
from torpor.store.pack import Entry

_VERIFY_THREADS = 2


class _Span(NamedTuple):
    """Where in the caller's memory a chunk belongs."""

    start: int
    end: int


class Reader:
    """Reads and authenticates chunks; every method may be called by several threads. Callers hold the store's lock."""

    def __init__(self, layout: Layout, keys: Keys, index: Index) -> None:
        self._layout, self._keys, self._index = layout, keys, index

    def read_into(self, ids: Sequence[bytes], out: memoryview, lengths: Sequence[int]) -> None:
        """Fill `out` with the chunks `ids` of `lengths` bytes, one after another.

        Raises IntegrityError when a chunk is missing or damaged, StoreError when the lengths do not fit `out`;
        `out` then holds nothing to be used.
        """
        view = out.cast("B")
        if len(ids) != len(lengths) or sum(lengths) != len(view):
            raise StoreError(f"{len(ids)} chunks of {sum(lengths)} bytes do not fill {len(view)} bytes of memory.")
        spans: dict[bytes, _Span] = {}
        repeats: list[tuple[bytes, _Span]] = []
        end = 0
        for chunk_id, length in zip(ids, lengths, strict=True):
            span = _Span(end, end := end + length)
            if spans.setdefault(chunk_id, span) is not span:
                repeats.append((chunk_id, span))
        if view:
            self._read(spans, view)
        for chunk_id, (start, end) in repeats:
            first = spans[chunk_id]
            if end - start != first.end - first.start:
                raise _unusable(chunk_id, "has another length")
            view[start:end] = view[first.start : first.end]

    def verify(self, manifest: Manifest, progress: Progress | None) -> None:
        """Read and authenticate every chunk of a manifest once; progress in bytes. Raises IntegrityError."""
        lengths: dict[bytes, int] = {}
        for thing in manifest.objects.values():
            for chunk_id, length in zip(thing.ids(), thing.lengths, strict=True):
                if lengths.setdefault(chunk_id, length) != length:
                    raise _unusable(chunk_id, "has another length")
        places = self._index.find(list(lengths))
        ordered = sorted(lengths, key=lambda chunk_id: places[chunk_id][-1] if chunk_id in places else Place("", 0, 0))
        buffers: SimpleQueue[memoryview] = SimpleQueue()

        def check(batch: list[bytes]) -> int:
            sizes = [lengths[chunk_id] for chunk_id in batch]
            buffer = buffers.get()
            try:
                self.read_into(batch, buffer[: sum(sizes)], sizes)
            finally:
                buffers.put(buffer)
            return sum(sizes)

        done, total = 0, sum(lengths.values())
        with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="torpor-verify") as threads:
            for _ in range(_VERIFY_THREADS):
                buffers.put(direct.new_buffer(WINDOW_BYTES))
            for size in threads.map(check, _batches(ordered, lengths)):
                done += size
                if progress:
                    progress(done, total)

    def _read(self, spans: dict[bytes, _Span], view: memoryview) -> None:
        places = self._index.find(list(spans))
        packs = defaultdict[str, list[Entry]](list)
        doubtful: list[bytes] = []
        for chunk_id, span in spans.items():
            place = places[chunk_id][-1] if chunk_id in places else None
            if place is not None and place.length == span.end - span.start:
                packs[place.pack].append(Entry(chunk_id, place.offset, place.length))
            else:
                doubtful.append(chunk_id)
        for name, entries in packs.items():
            doubtful.extend(self._read_pack(name, sorted(entries, key=lambda entry: entry.offset), spans, view))
        for chunk_id in doubtful:
            span = spans[chunk_id]
            self._read_one(chunk_id, view[span.start : span.end])

    def _read_pack(
        self, name: str, entries: list[Entry], spans: dict[bytes, _Span], view: memoryview
    ) -> Iterator[bytes]:
        try:
            fd = pack.open_readable(self._layout, name)
        except OSError:
            yield from (entry.id for entry in entries)  # each is looked for elsewhere, and named if it is nowhere
            return
        try:
            for window in pack.windows(entries, WINDOW_BYTES):
                targets = [view[slice(*spans[entry.id])] for entry in window]
                if not _fill(fd, window, targets):
                    yield from (entry.id for entry in window)
                    continue
                for entry, target in zip(window, targets, strict=True):
                    if self._keys.chunk_id(target) != entry.id:
                        yield entry.id
        finally:
            os.close(fd)

    def _read_one(self, chunk_id: bytes, target: memoryview) -> None:
        if self._keys.is_zero_chunk(chunk_id, len(target)):
            target[:] = bytes(len(target))
            return
        tried: set[str] = set()
        for look_again in (_as_it_is, self._refreshed, self._index.rebuild):
            if not look_again():
                continue
            for place in reversed(self._index.find([chunk_id]).get(chunk_id, [])):
                if self._read_place(place, chunk_id, target):
                    return
                tried.add(place.pack)
                self._index.suspect(place.pack, [chunk_id])
        target[:] = bytes(len(target))
        raise _unusable(chunk_id, f"is damaged in the pack {' and in '.join(sorted(tried))}" if tried else "is missing")

    def _read_place(self, place: Place, chunk_id: bytes, target: memoryview) -> bool:
        if place.length != len(target):
            return False
        try:
            fd = pack.open_readable(self._layout, place.pack)
        except OSError:
            return False
        try:
            entry = Entry(chunk_id, place.offset, place.length)
            return _fill(fd, [entry], [target]) and self._keys.chunk_id(target) == chunk_id
        finally:
            os.close(fd)

    def _refreshed(self) -> bool:
        self._index.refresh()
        return True


def _fill(fd: int, window: list[Entry], targets: list[memoryview]) -> bool:
    """Read neighbouring chunks with one system call, if all goes well; False when the disk does not give them."""
    begin = window[0].offset
    size = window[-1].offset + padded(window[-1].length) - begin
    in_place = all(len(target) % PAGE == 0 and direct.address(target) % PAGE == 0 for target in targets)
    try:
        if in_place:
            return os.preadv(fd, targets, begin) == size
        data = scratch()[:size]
        direct.read_fully(fd, data, begin)
    except OSError:
        return False
    for entry, target in zip(window, targets, strict=True):
        target[:] = data[entry.offset - begin : entry.offset - begin + entry.length]
    return True


def _batches(ordered: list[bytes], lengths: dict[bytes, int]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for chunk_id in ordered:
        if size + lengths[chunk_id] > WINDOW_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(chunk_id)
        size += lengths[chunk_id]
    if batch:
        yield batch


def _as_it_is() -> bool:
    return True


def _unusable(chunk_id: bytes, how: str) -> IntegrityError:
    return IntegrityError(
        f"The chunk {chunk_id.hex()[:16]} {how}.",
        safe="Nothing of it was used; checkpoints that do not hold this chunk can be used.",
        hint="Look for errors of the store's disk; an earlier checkpoint may be whole: `torpor verify` tells.",
    )
