"""The processes that wait for one task's memory - itself and what it forked since -, and how a page gets to them."""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

from torpor.engine import userfault
from torpor.engine.lazy_plan import LazyTask, Piece
from torpor.engine.page_map import DELIVERED, DROPPED, Extent, PageMap
from torpor.engine.userfault import PAGE

ZEROS_AT_ONCE = 64 * PAGE
LATER = frozenset({errno.EAGAIN, errno.ENOMEM})  # an event waits to be read first, or memory is short


class Gate:
    """Pages go out while nobody reads events, and events are read while no page goes out: a page that was thrown away
    is never put back, and a forked child never misses one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._going_out = 0
        self._reading = 0

    @contextmanager
    def deliver(self) -> Iterator[None]:
        """Any number at a time, unless a reader has come."""
        with self._condition:
            while self._reading:
                self._condition.wait()
            self._going_out += 1
        try:
            yield
        finally:
            with self._condition:
                self._going_out -= 1
                if not self._going_out:
                    self._condition.notify_all()

    @contextmanager
    def read(self) -> Iterator[None]:
        """One alone (there is one thread that reads, or closes)."""
        with self._condition:
            while self._reading:
                self._condition.wait()
            self._reading = 1
            while self._going_out:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._reading = 0
                self._condition.notify_all()


class Waiting:
    """One process that waits for memory. To be used inside the gate."""

    def __init__(self, number: int, uffd: int, pages: PageMap) -> None:
        self.number, self.uffd, self.pages = number, uffd, pages
        self.gone = False

    def deliver(self, piece: Piece, source: int, *, all_registered: bool) -> bool:
        """Puts what it waits for of a piece, which lies at our address `source`, in place; False: try again later."""
        return all(
            self._copy(extent, source + (extent.page - piece.first) * PAGE, all_registered=all_registered)
            for extent in list(self.pages.waiting(piece.first, piece.last))
        )

    def give_zeros(self, address: int) -> bool:
        """Answers a touch where nothing was saved, or what was saved was thrown away; False: try again later."""
        if self.pages.was_delivered(address):
            userfault.wake(self.uffd, address, PAGE)
            return True
        size = self.pages.nothing_until(address, address + ZEROS_AT_ONCE) - address
        done, code = userfault.zero(self.uffd, address, size)
        if not done and code == errno.ENOENT and size > PAGE:
            done, code = userfault.zero(self.uffd, address, PAGE)
        if not done and code == errno.EEXIST:
            userfault.wake(self.uffd, address, PAGE)
        self.gone |= code == errno.ESRCH
        return bool(done) or code not in LATER

    def _copy(self, extent: Extent, source: int, *, all_registered: bool) -> bool:
        address, page = extent.start, extent.page
        limit = whole = extent.end - extent.start
        while address < extent.end and not self.gone:
            size = min(limit, extent.end - address)
            done, code = userfault.copy(self.uffd, address, source, size)
            if done:
                self.pages.mark(page, page + done // PAGE, DELIVERED)
                limit = whole
            elif code == errno.ESRCH:
                self.gone = True
                return True
            elif code == errno.ENOENT and size > PAGE:  # it spans mappings now
                limit = max(PAGE, size // 2 // PAGE * PAGE)
                continue
            elif code == errno.EEXIST:
                self.pages.mark(page, page + 1, DELIVERED)
                userfault.wake(self.uffd, address, PAGE)
                done = PAGE
            elif code == errno.ENOENT:
                if all_registered:
                    self.pages.mark(page, page + 1, DROPPED)
                done = PAGE
            elif code in LATER:
                return False
            else:
                raise OSError(code, f"UFFDIO_COPY of {size} bytes at {address:#x}")
            address, page, source = address + done, page + done // PAGE, source + done
        return True


class Family:
    """All that wait for the memory of one task."""

    def __init__(self, task: LazyTask) -> None:
        self.task = task
        self.members: list[Waiting] = []
        self._firsts = [piece.first for piece in task.pieces]

    def piece_of(self, page: int) -> Piece:
        """The piece that holds a page."""
        return self.task.pieces[bisect_right(self._firsts, page) - 1]

    def following(self, piece: Piece, size: int) -> list[Piece]:
        """The pieces after this one, at most `size` bytes."""
        position = bisect_right(self._firsts, piece.first)
        found: list[Piece] = []
        for one in self.task.pieces[position : position + size // PAGE]:
            size -= one.size
            if size < 0:
                break
            found.append(one)
        return found

    def waits(self, piece: Piece) -> bool:
        """Whether anybody waits for a page of it."""
        return any(not one.gone and one.pages.waits(piece.first, piece.last) for one in self.members)

    def deliver(self, piece: Piece, source: int, *, all_registered: bool) -> bool:
        """To everybody who waits for it; False when some of them have to be tried again."""
        here = [one for one in self.members if not one.gone]
        return sum(one.deliver(piece, source, all_registered=all_registered) for one in here) == len(here)

    def arrived(self, piece: Piece) -> None:
        """On record: everybody who waited for this piece has it."""
        for one in self.members:
            one.pages.arrived(piece.first, piece.last)
