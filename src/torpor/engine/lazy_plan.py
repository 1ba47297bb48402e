"""Which saved memory can arrive while the session runs already, and which must be there before.

Lazy is what CRIU marked so when it saved (private anonymous memory), less what a lazy return would spoil: pages that
processes of the session share after a fork would be there once for each, memory that a child of a fork must find
empty (MADV_WIPEONFORK) must not be handed to such a child, and what the kernel shows in /proc is not waited for there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torpor.engine.page_map import DELIVERED, WAITING, Extent, PageMap
from torpor.engine.pagestream import FLAG_PRESENT, PAGE, TYPE_TASK, Entry, PageObject

FLAG_LAZY = 2

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """One chunk of a task's memory; its pages have the numbers from `first` to `last`."""

    chunk: bytes
    first: int
    last: int
    address: int  # where its first page was saved

    @property
    def size(self) -> int:
        """Bytes."""
        return (self.last - self.first) * PAGE


@dataclass
class LazyTask:
    """The memory of one process that arrives late."""

    image_id: int
    pieces: list[Piece] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    pages: int = 0

    def new_map(self) -> PageMap:
        """What the process waits for when it starts."""
        states = bytearray([DELIVERED]) * self.pages
        for extent in self.extents:
            states[extent.page : extent.last] = bytes([WAITING]) * (extent.last - extent.page)
        return PageMap(self.extents, states)

    @property
    def size(self) -> int:
        """Bytes that arrive late."""
        return sum(extent.end - extent.start for extent in self.extents)


def lazy_tasks(objects: Sequence[PageObject], never: Mapping[int, Ranges]) -> list[LazyTask]:
    """What arrives late of each task; `never` names, by task, the addresses that must not.

    The entries of `objects` are changed accordingly: those that still carry CRIU's flag LAZY, and only those, are late.
    """
    tasks = [found for found in objects if found.kind == TYPE_TASK]
    shared = _shared(tasks) if len(tasks) > 1 else frozenset()
    return [_lazy(found, shared, never.get(found.image_id, ())) for found in tasks]


def eager_pieces(found: PageObject) -> Iterator[tuple[int, int]]:
    """(number, offset in the pages image) of each chunk that holds a page which is not late."""
    eager = _page_flags(found)
    page = 0
    for number, length in enumerate(found.lengths):
        count = length // PAGE
        if eager.find(b"\1", page, page + count) >= 0:
            yield number, page * PAGE
        page += count


def _lazy(found: PageObject, shared: frozenset[tuple[int, bytes]], never: Ranges) -> LazyTask:
    late = _page_flags(found).translate(bytes([1, 0]) + bytes(254))
    addresses = _addresses(found)
    task = LazyTask(found.image_id)
    for chunk, length in zip(found.ids, found.lengths, strict=True):
        piece = Piece(chunk, task.pages, task.pages + length // PAGE, addresses.at(task.pages))
        if (piece.address, chunk) in shared:
            late[piece.first : piece.last] = bytes(piece.last - piece.first)
        task.pages = piece.last
        task.pieces.append(piece)
    for start, end in never:
        for extent in addresses.between(start, end):
            late[extent.page : extent.last] = bytes(extent.last - extent.page)
    found.entries = list(_marked(found.entries, late))
    page = 0
    for entry in found.entries:
        if entry.flags & FLAG_PRESENT:
            if entry.flags & FLAG_LAZY:
                task.extents.append(Extent(entry.vaddr, entry.vaddr + entry.pages * PAGE, page))
            page += entry.pages
    task.pieces = [piece for piece in task.pieces if late.find(b"\1", piece.first, piece.last) >= 0]
    return task


def _shared(tasks: Sequence[PageObject]) -> frozenset[tuple[int, bytes]]:
    """(address, chunk) of what several tasks have at the same place: what they inherited from one another."""
    seen: Counter[tuple[int, bytes]] = Counter()
    for found in tasks:
        addresses = _addresses(found)
        page = 0
        for chunk, length in zip(found.ids, found.lengths, strict=True):
            seen[addresses.at(page), chunk] += 1
            page += length // PAGE
    return frozenset(place for place, count in seen.items() if count > 1)


class _Addresses:
    """Where the pages of a task, by number, were saved. To be asked in ascending order."""

    def __init__(self, extents: list[Extent]) -> None:
        self._extents = extents
        self._position = 0

    def at(self, page: int) -> int:
        while page >= self._extents[self._position].last:
            self._position += 1
        extent = self._extents[self._position]
        return extent.start + (page - extent.page) * PAGE

    def between(self, start: int, end: int) -> Iterator[Extent]:
        for extent in self._extents:
            if extent.start < end and extent.end > start:
                yield extent.cut(start, end)


def _addresses(found: PageObject) -> _Addresses:
    extents, page = [], 0
    for entry in found.entries:
        if entry.flags & FLAG_PRESENT:
            extents.append(Extent(entry.vaddr, entry.vaddr + entry.pages * PAGE, page))
            page += entry.pages
    return _Addresses(extents)


def _page_flags(found: PageObject) -> bytearray:
    """One byte for each saved page: 1 when it must be there at once."""
    flags = bytearray()
    for entry in found.entries:
        if entry.flags & FLAG_PRESENT:
            flags += bytes([0 if entry.flags & FLAG_LAZY else 1]) * entry.pages
    return flags


def _marked(entries: Sequence[Entry], late: bytearray) -> Iterator[Entry]:
    """The entries, divided where lateness changes, with CRIU's flag for it."""
    page = 0
    for entry in entries:
        if not entry.flags & FLAG_PRESENT:
            yield entry
            continue
        end = page + entry.pages
        address = entry.vaddr
        while page < end:
            mark = late[page : page + 1]
            stop = late.find(bytes([1 - mark[0]]), page, end)
            stop = end if stop < 0 else stop
            flags = entry.flags & ~FLAG_LAZY | FLAG_LAZY * mark[0]
            yield Entry(address, stop - page, flags)
            address += (stop - page) * PAGE
            page = stop
