"""The way out: CRIU's page-server protocol, received as fast as memory allows.

`criu dump --page-server --ps-socket FD` sends every memory page, with its virtual address, over a socket
that we own. The receiver copies them into reusable segments and hands full segments to a callback (run by
a few threads), so that hashing and writing go on behind CRIU's back.

The protocol is internal to CRIU (criu/page-xfer.c, 4.1 to 4.2): 32-byte little-endian messages `u32 cmd,
4 bytes padding, u64 nr_pages, u64 vaddr, u64 dst_id`. `torpor doctor` proves it on every machine.
"""

from __future__ import annotations

import mmap
import queue
import socket
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torpor.errors import EngineError, TorporError

PAGE = mmap.PAGESIZE
SEGMENT = 8 << 20
STORERS = 3  # one waits for the disk while two cores hash
LARGE_MAPPING = 64 << 20
SMALL_BLOCK = 64 << 10
LARGE_BLOCK = 256 << 10

MESSAGE = struct.Struct("<IxxxxQQQ")
COMMAND_MASK = 0xFFFF
OPEN2, PARENT, ADD_F = 4, 5, 6
CLOSE, FORCE_CLOSE = 0x1023, 0x1024
FLAG_PRESENT = 4
TYPE_TASK, TYPE_SHMEM = 1, 2

ZERO_BYTE = b"\0"
ZERO_INT = b"\0\0\0\0"


@dataclass(frozen=True)
class Entry:
    """One run of pages as CRIU announced it: `flags` are CRIU's pagemap flags (1 parent, 2 lazy, 4 present)."""

    vaddr: int
    pages: int
    flags: int


@dataclass
class PageObject:
    """The memory of one task or one shared mapping: its pagemap, and its present pages as a list of chunks."""

    kind: int  # TYPE_TASK or TYPE_SHMEM
    image_id: int
    entries: list[Entry] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    segments: int = 0

    @property
    def name(self) -> str:
        """The object's name in a manifest, e.g. `pages/task/12`."""
        return f"pages/{'task' if self.kind == TYPE_TASK else 'shmem'}/{self.image_id}"

    @property
    def bytes_present(self) -> int:
        """Bytes of pages that travelled."""
        return sum(self.lengths)


class Put(Protocol):
    """Stores one segment: `cuts` are the end offsets of its chunks; returns one id per chunk."""

    def __call__(self, segment: memoryview, cuts: list[int], /) -> list[bytes]:
        """Called by several threads; does not keep `segment`."""
        ...


Mappings = Sequence[tuple[int, int]]  # (start, end), ascending


class Blocks:
    """Where chunks end: at multiples of a block size counted from the start of their mapping.

    Anchoring blocks to the mapping keeps chunks equal when a process is loaded at other addresses, and in
    a second process that holds the same data. Large mappings get larger blocks.
    """

    def __init__(self, mappings: Mappings) -> None:
        self._mappings = mappings
        self._starts = [start for start, _ in mappings]

    def end(self, vaddr: int) -> int:
        """The first block boundary after `vaddr`."""
        position = bisect_right(self._starts, vaddr) - 1
        if position >= 0:
            start, end = self._mappings[position]
            if vaddr < end:
                block = LARGE_BLOCK if end - start >= LARGE_MAPPING else SMALL_BLOCK
                return min(end, start + ((vaddr - start) // block + 1) * block)
        return (vaddr // SMALL_BLOCK + 1) * SMALL_BLOCK


@dataclass
class _Segment:
    buffer: memoryview
    used: int = 0
    cuts: list[int] = field(default_factory=list)
    target: PageObject | None = None
    number: int = 0


class SegmentPool:
    """Reusable page-aligned buffers of SEGMENT bytes, created on demand up to a limit.

    `touched` bytes of them are made at once, with their pages: the first touch of memory costs several times as much
    as a copy, and is better paid before a session is frozen.
    """

    def __init__(self, limit: int, touched: int = 0) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lock = threading.Lock()
        count = max(2, limit // SEGMENT)
        ready = min(count, -(-touched // SEGMENT))
        for _ in range(ready):
            self._free.put(_new_segment(mmap.MAP_POPULATE))
        self._may_create = count - ready

    def take(self) -> memoryview:
        """A free buffer; waits for one when the limit is reached."""
        return self.take_now() or self._free.get()

    def take_now(self) -> memoryview | None:
        """A free buffer, or None when the limit is reached."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            with self._lock:
                create = self._may_create > 0
                self._may_create -= create
            return _new_segment() if create else None

    def give(self, buffer: memoryview) -> None:
        """Hands a buffer back."""
        self._free.put(buffer)


def _new_segment(further_flags: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, SEGMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | further_flags))


class PageReceiver:
    """Receives one dump's pages from `connection` and stores them through `put`.

    `mappings_of(image_id)` tells the mappings of a task, so that chunks can be cut relative to them.
    With `store_later` nothing is stored before all is received or the pool is used up: while a session waits frozen
    only to run on, hashing would take the cores from copying. Call `receive` (blocks until CRIU closes the stream),
    then `finish`.
    """

    def __init__(
        self,
        connection: socket.socket,
        put: Put,
        mappings_of: Callable[[int], Mappings],
        pool: SegmentPool,
        *,
        store_later: bool = False,
        threads: int = STORERS,
    ) -> None:
        self._connection = connection
        self._put = put
        self._mappings_of = mappings_of
        self._pool = pool
        self._objects: dict[tuple[int, int], PageObject] = {}
        self._blocks: dict[tuple[int, int], Blocks] = {}
        self._filled: queue.SimpleQueue[_Segment | None] = queue.SimpleQueue()
        self._results: dict[tuple[int, int, int], tuple[list[bytes], list[int]]] = {}
        self._failure: BaseException | None = None
        self._header = bytearray(MESSAGE.size)
        self._segment: _Segment | None = None
        self._block_end = 0
        self.bytes_received = 0
        self._may_store = threading.Event()
        if not store_later:
            self._may_store.set()
        self._workers = [threading.Thread(target=self._store, daemon=True) for _ in range(threads)]
        for worker in self._workers:
            worker.start()

    def receive(self) -> None:
        """Takes everything that CRIU sends. Returns at CRIU's CLOSE; raises EngineError when it just hangs up."""
        while True:
            self._receive_into(memoryview(self._header))
            command, pages, vaddr, destination = MESSAGE.unpack(self._header)
            match command & COMMAND_MASK:
                case 6:
                    self._add(destination, Entry(vaddr, pages, command >> 16))
                case 4:
                    self._connection.sendall(ZERO_BYTE)
                case 5:
                    self._connection.sendall(ZERO_INT)
                case 0x1023 | 0x1024:
                    self._flush()
                    self._connection.sendall(ZERO_INT)
                    return
                case unknown:
                    raise EngineError(f"CRIU sent page-server command {unknown}, which this Torpor does not know.")

    def finish(self) -> list[PageObject]:
        """Waits until everything received is stored; the objects with their chunk ids in stream order.

        Raises whatever `put` raised.
        """
        self._may_store.set()
        for _ in self._workers:
            self._filled.put(None)
        for worker in self._workers:
            worker.join()
        if self._failure is not None:
            raise self._failure
        for (kind, image_id, _), (ids, lengths) in sorted(self._results.items()):
            found = self._objects[kind, image_id]
            found.ids += ids
            found.lengths += lengths
        self._results.clear()
        return list(self._objects.values())

    def _add(self, destination: int, entry: Entry) -> None:
        key = (destination & 0xFF, destination >> 8)
        target = self._objects.get(key)
        if target is None:
            target = self._objects[key] = PageObject(*key)
            self._blocks[key] = Blocks(self._mappings_of(key[1]) if key[0] == TYPE_TASK else [(0, 1 << 62)])
        target.entries.append(entry)
        if not entry.flags & FLAG_PRESENT:
            return
        self._copy(target, self._blocks[key], entry.vaddr, entry.pages * PAGE)

    def _copy(self, target: PageObject, blocks: Blocks, vaddr: int, size: int) -> None:
        end = vaddr + size
        if self._segment is not None and self._segment.target is not target:
            self._flush()
        while vaddr < end:
            if self._failure is not None:
                raise self._failure
            segment = self._segment
            if segment is not None and vaddr >= self._block_end:
                self._cut(segment)
                if SEGMENT - segment.used < LARGE_BLOCK:
                    self._flush()
                    segment = None
            if segment is None:
                segment = self._segment = _Segment(self._buffer(), target=target, number=target.segments)
                target.segments += 1
                self._block_end = blocks.end(vaddr)
            elif vaddr >= self._block_end:
                self._block_end = blocks.end(vaddr)
            vaddr = self._fill(segment, blocks, vaddr, end)

    def _fill(self, segment: _Segment, blocks: Blocks, vaddr: int, end: int) -> int:
        """Receives as many whole blocks as fit with one call; the cuts between them are noted."""
        first = vaddr
        offset = segment.used
        while True:
            vaddr = min(end, self._block_end)
            offset = segment.used + vaddr - first
            if vaddr == end or SEGMENT - offset < LARGE_BLOCK:
                break
            segment.cuts.append(offset)
            self._block_end = blocks.end(vaddr)
        self._receive_into(segment.buffer[segment.used : offset])
        segment.used = offset
        return vaddr

    def _cut(self, segment: _Segment) -> None:
        if segment.used > (segment.cuts[-1] if segment.cuts else 0):
            segment.cuts.append(segment.used)

    def _flush(self) -> None:
        if self._segment is not None:
            self._cut(self._segment)
            self._filled.put(self._segment)
            self._segment = None

    def _buffer(self) -> memoryview:
        buffer = self._pool.take_now()
        if buffer is None:
            self._may_store.set()
            buffer = self._pool.take()
        return buffer

    def _receive_into(self, view: memoryview) -> None:
        received = 0
        while received < len(view):
            count = self._connection.recv_into(view[received:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise EngineError("CRIU closed the page stream before its end.")
            received += count
        self.bytes_received += received

    def _store(self) -> None:
        self._may_store.wait()
        while (segment := self._filled.get()) is not None:
            try:
                if self._failure is None and segment.used:
                    target = segment.target
                    assert target is not None
                    ids = self._put(segment.buffer[: segment.used], segment.cuts)
                    lengths = [end - start for start, end in zip([0, *segment.cuts], segment.cuts, strict=False)]
                    self._results[target.kind, target.image_id, segment.number] = (ids, lengths)
            except (TorporError, OSError, ValueError) as failure:
                self._failure = failure
            finally:
                self._pool.give(segment.buffer)
