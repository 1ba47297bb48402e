"""Where the saved pages of one process belong now, and which of them it still waits for: plain data, no effects.

A task's saved pages have numbers, in the order in which they are stored. A process starts with them where they were
saved; what it does meanwhile (mremap, munmap, MADV_DONTNEED, fork) moves them, drops them or makes a second process
that waits for them too.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
WAITING, DELIVERED, DROPPED = 0, 1, 2  # DROPPED: the process threw it away; a touch finds zeros
_MARKS = {state: bytes([state]) for state in (WAITING, DELIVERED, DROPPED)}


@dataclass(frozen=True)
class Extent:
    """Neighbouring saved pages, from number `page` on, that belong at the addresses from `start` to `end`."""

    start: int
    end: int
    page: int

    @property
    def last(self) -> int:
        """The number after its last page."""
        return self.page + (self.end - self.start) // PAGE

    def cut(self, start: int, end: int) -> Extent:
        """The part between two addresses, which must overlap it."""
        begin = max(self.start, start)
        return Extent(begin, min(self.end, end), self.page + (begin - self.start) // PAGE)

    def moved(self, by: int) -> Extent:
        """The same pages at other addresses."""
        return Extent(self.start + by, self.end + by, self.page)


class PageMap:
    """The map of one process; all addresses are multiples of a page."""

    def __init__(self, extents: Iterable[Extent], states: bytearray) -> None:
        """`states` has one mark for each saved page of the task; pages that are in no extent must not be WAITING."""
        self._extents = sorted(extents, key=lambda extent: extent.start)
        self._states = states
        self._starts: list[int] = []
        self._by_page: list[Extent] = []
        self._overtaken: list[tuple[int, int]] = []
        self._index()

    def copied(self) -> PageMap:
        """What a forked child waits for."""
        return PageMap(self._extents, bytearray(self._states))

    @property
    def complete(self) -> bool:
        """Whether no page is waited for."""
        return self._states.find(_MARKS[WAITING]) < 0

    def waits(self, first: int, last: int) -> bool:
        """Whether one of the pages with these numbers is waited for."""
        return self._states.find(_MARKS[WAITING], first, last) >= 0

    def page_at(self, address: int) -> int | None:
        """The number of the saved page that is waited for at this address; None when a touch finds zeros there, or
        what was delivered."""
        extent = self._extent_at(address)
        if extent is None:
            return None
        page = extent.page + (address - extent.start) // PAGE
        return page if self._states[page] == WAITING else None

    def was_delivered(self, address: int) -> bool:
        """Whether the saved page was put at this address, and not thrown away since."""
        extent = self._extent_at(address)
        return extent is not None and self._states[extent.page + (address - extent.start) // PAGE] == DELIVERED

    def nothing_until(self, address: int, limit: int) -> int:
        """The end of the addresses from `address` on, at most `limit`, at which a touch finds zeros."""
        while address < limit:
            position = bisect_right(self._starts, address) - 1
            extent = self._extents[position] if position >= 0 else None
            if extent is not None and address < extent.end:
                if self._states[extent.page + (address - extent.start) // PAGE] != DROPPED:
                    return address
                address += PAGE
            elif position + 1 < len(self._extents):
                address = min(limit, self._extents[position + 1].start)
            else:
                return limit
        return limit

    def waiting(self, first: int, last: int) -> Iterator[Extent]:
        """The pages with these numbers that are waited for, and where they belong; as few extents as possible."""
        position = max(0, bisect_right(self._by_page, first, key=lambda extent: extent.page) - 1)
        while position < len(self._by_page) and self._by_page[position].page < last:
            extent = self._by_page[position]
            position += 1
            page, end = max(first, extent.page), min(last, extent.last)
            while page < end:
                page = self._states.find(_MARKS[WAITING], page, end)
                if page < 0:
                    break
                ahead = self._states[page:end]
                stop = end - len(ahead.lstrip(_MARKS[WAITING]))
                start = extent.start + (page - extent.page) * PAGE
                yield Extent(start, start + (stop - page) * PAGE, page)
                page = stop

    def mark(self, first: int, last: int, state: int) -> None:
        """Marks the pages with these numbers."""
        self._states[first:last] = _MARKS[state] * (last - first)

    def arrived(self, first: int, last: int) -> None:
        """Whatever of these pages was waited for has been delivered."""
        for extent in list(self.waiting(first, last)):
            self.mark(extent.page, extent.last, DELIVERED)

    def removed(self, start: int, end: int) -> None:
        """MADV_DONTNEED and its like: whatever was there, a touch finds zeros now."""
        for extent in self._between(start, end):
            self.mark(extent.page, extent.last, DROPPED)

    def unmapped(self, start: int, end: int) -> None:
        """Nothing is mapped there any more, unless the news of it was overtaken by that of a move to this place."""
        for overtaken in self._overtaken:
            if overtaken[0] < end and start < overtaken[1]:
                self._overtaken.remove(overtaken)
                if start < overtaken[0]:
                    self.unmapped(start, overtaken[0])
                if overtaken[1] < end:
                    self.unmapped(overtaken[1], end)
                return
        self._drop(start, end)

    def remapped(self, start: int, target: int, size: int) -> None:
        """mremap moved what was at `start` to `target`.

        The kernel tells of an unmapping before it tells the same thread's move to that place; when there is something
        in our map still, another thread was quicker, and the news of the unmapping is yet to come.
        """
        moved = self._take_out(start, start + size)
        if any(True for _ in self._between(target, target + size)):
            self._overtaken.append((target, target + size))
            self._drop(target, target + size)
        self._extents += [extent.moved(target - start) for extent in moved]
        self._extents.sort(key=lambda extent: extent.start)
        self._index()

    def _drop(self, start: int, end: int) -> None:
        self.removed(start, end)
        self._take_out(start, end)

    def _extent_at(self, address: int) -> Extent | None:
        position = bisect_right(self._starts, address) - 1
        if position >= 0 and address < self._extents[position].end:
            return self._extents[position]
        return None

    def _between(self, start: int, end: int) -> Iterator[Extent]:
        position = max(0, bisect_right(self._starts, start) - 1)
        for extent in self._extents[position : bisect_left(self._starts, end)]:
            if extent.end > start:
                yield extent.cut(start, end)

    def _take_out(self, start: int, end: int) -> list[Extent]:
        """Removes the extents between two addresses; returns them."""
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, end)
        taken, left = [], []
        for extent in self._extents[first:last]:
            if extent.end <= start:
                left.append(extent)
                continue
            taken.append(extent.cut(start, end))
            left += [extent.cut(extent.start, start)] * (extent.start < start)
            left += [extent.cut(end, extent.end)] * (end < extent.end)
        self._extents[first:last] = left
        self._index()
        return taken

    def _index(self) -> None:
        self._starts = [extent.start for extent in self._extents]
        self._by_page = sorted(self._extents, key=lambda extent: extent.page)
