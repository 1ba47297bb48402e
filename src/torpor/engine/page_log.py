"""What has happened to the processes that wait for memory, in memory that outlives whoever serves it.

The kernel gives each event away once. It is read straight into the next free record, so that whoever takes over from a
page source that was killed finds it there, wherever the old one stopped.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

from torpor.engine import userfault

ROOM = 256 << 20  # bytes of address space, for millions of events; memory is used as far as it is written
CONNECTED, OPENED, STARTED, ARRIVED, CLOSED, STOPPED, CONTINUED = range(1, 8)  # our own records
MAP_NORESERVE = 0x4000

_COUNT = struct.Struct("<Q")
_HEAD = struct.Struct("<Q")
_BODY = struct.Struct("<B7xQQQ")
_RECORD = _HEAD.size + userfault.MESSAGE_BYTES
_FIRST = 64
_FROM_KERNEL = (userfault.FORK, userfault.REMAP, userfault.REMOVE, userfault.UNMAP)


class Record(NamedTuple):
    """One thing that happened: to which process (its number in the order of OPENED and FORK), and three numbers."""

    process: int
    event: int
    first: int
    second: int
    third: int


class PageLog:
    """Made before the first process is cloned; all of them have it. `read` has one caller at a time."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ROOM, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self._address = userfault.address_of(self._memory)
        self._lock = threading.Lock()

    def take_over(self) -> None:
        """Called by whoever serves next: the last message that was read counts."""
        self._lock = threading.Lock()
        slot = self._slot()
        if self._memory[slot + _HEAD.size] in _FROM_KERNEL:
            self._commit()

    def records(self) -> Iterator[Record]:
        """Everything that has happened, in order."""
        for number in range(self._count()):
            slot = _FIRST + number * _RECORD
            (process,) = _HEAD.unpack_from(self._memory, slot)
            yield Record(process, *_BODY.unpack_from(self._memory, slot + _HEAD.size))

    def add(self, process: int, event: int, first: int = 0, second: int = 0, third: int = 0) -> None:
        """Adds a record of our own."""
        with self._lock:
            slot = self._slot()
            _HEAD.pack_into(self._memory, slot, process)
            _BODY.pack_into(self._memory, slot + _HEAD.size, event, first, second, third)
            self._commit()

    def read(self, uffd: int, process: int) -> Record | None:
        """The next message of a process; None when there is none now. Events are on record, faults are not."""
        with self._lock:
            slot = self._slot()
            _HEAD.pack_into(self._memory, slot, process)
            self._memory[slot + _HEAD.size] = 0
            if not userfault.read_into(uffd, self._address + slot + _HEAD.size):
                return None
            record = Record(process, *_BODY.unpack_from(self._memory, slot + _HEAD.size))
            if record.event in _FROM_KERNEL:
                self._commit()
            else:
                self._memory[slot + _HEAD.size] = 0
            return record

    def _count(self) -> int:
        return int(_COUNT.unpack_from(self._memory)[0])

    def _slot(self) -> int:
        slot = _FIRST + self._count() * _RECORD
        if slot + _RECORD > ROOM:
            raise MemoryError("More happened to the session's memory than its page source can keep.")
        return slot

    def _commit(self) -> None:
        _COUNT.pack_into(self._memory, 0, self._count() + 1)
