"""Packs being written: one copy into a page-aligned buffer, from there to the disk by background threads.

The number of buffers is fixed; whoever appends waits for the disk when all are full. A finished pack is flushed and
announced while the next one is being filled.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torpor.errors import StoreError, TorporError
from torpor.store import direct, pack
from torpor.store.direct import PAGE, padded
from torpor.store.keys import Keys
from torpor.store.layout import Layout

BUFFER_BYTES = 4 << 20

_ZEROS = bytes(PAGE)


@dataclass
class OpenPack:
    """A pack in `incoming`. `end` counts bytes handed over; `mac` is set with its last buffer."""

    name: str
    fd: int
    entries: list[pack.Entry] = field(default_factory=list)
    end: int = 0
    unwritten: int = 0
    mac: bytes = b""


class PackStream:
    """Writes chunks into packs, in order. `append` and `finish` by one thread at a time; the rest by any.

    `finished(pack)` is called in a background thread for every pack that is whole and flushed.
    """

    def __init__(
        self, layout: Layout, keys: Keys, finished: Callable[[OpenPack], None], threads: int, buffer: int
    ) -> None:
        self.names: list[str] = []
        self._layout, self._keys, self._finished = layout, keys, finished
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="torpor-pack")
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(threads + 1):
            self._free.put(direct.new_buffer(buffer))
        self._buffer, self._filled = direct.new_buffer(buffer), 0
        self._pack: OpenPack | None = None
        self._open: dict[str, OpenPack] = {}
        self._failure: OSError | TorporError | None = None
        self._tasks: list[Future[None]] = []
        self._progress = threading.Condition()
        self._unwritten = 0

    def append(self, chunk_id: bytes, data: memoryview) -> None:
        """Copy one chunk into a pack; waits while every buffer is on its way to the disk. Raises StoreError."""
        size = padded(len(data))
        if self._pack is None or self._pack.end + size > pack.SIZE:
            self._complete()
            self._begin()
        assert self._pack is not None
        self._pack.entries.append(pack.Entry(chunk_id, self._pack.end, len(data)))
        self._copy(self._pack, data)

    def finish(self) -> None:
        """Complete the last pack and wait until all are whole, flushed and announced. Raises StoreError."""
        self._complete()
        for task in self._tasks:
            task.result()
        self._pool.shutdown()
        self.check()

    def stop(self) -> None:
        """Write nothing more; whoever waits in `append` gets an error."""
        self._failure = self._failure or StoreError("The checkpoint was abandoned.")

    def remove(self) -> None:
        """After `stop`: remove the packs that are still in `incoming`. Raises StoreError."""
        self._pool.shutdown(wait=True)
        while self._open:
            os.close(self._open.popitem()[1].fd)
        try:
            for name in self.names:
                (self._layout.incoming / name).unlink(missing_ok=True)
        except OSError as error:
            raise direct.store_error(error, "The unfinished packs cannot be removed") from error

    def check(self) -> None:
        """Raise the StoreError of a background thread, if there was one."""
        if isinstance(self._failure, OSError):
            raise direct.store_error(self._failure, "The checkpoint's memory cannot be stored") from self._failure
        if self._failure is not None:
            raise self._failure

    def wait_for_lull(self) -> None:
        """Return as soon as no buffer is on its way to the disk, so that reading does not slow the writing down."""
        with self._progress:
            self._progress.wait_for(lambda: self._unwritten == 0)

    def _begin(self) -> None:
        path = self._layout.fresh()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._layout.direct_flag
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise direct.store_error(error, "The checkpoint's memory cannot be stored") from error
        self._pack = self._open[path.name] = OpenPack(path.name, fd)
        self.names.append(path.name)
        self._copy(self._pack, memoryview(pack.header(self._keys)))

    def _complete(self) -> None:
        done, self._pack = self._pack, None
        if done is not None:
            tail, mac = pack.tail(done.entries, done.end, self._keys)
            self._copy(done, memoryview(tail))
            self._flush(done, mac)

    def _copy(self, into: OpenPack, data: memoryview) -> None:
        size = padded(len(data))
        if self._filled + size > len(self._buffer):
            self._flush(into)
        start, end = self._filled, self._filled + len(data)
        self._buffer[start:end] = data
        self._filled += size
        self._buffer[end : self._filled] = _ZEROS[: size - len(data)]
        into.end += size

    def _flush(self, source: OpenPack, mac: bytes = b"") -> None:
        buffer, filled, self._filled = self._buffer, self._filled, 0
        with self._progress:
            source.unwritten += 1
            source.mac = mac
            self._unwritten += 1
        self._tasks.append(self._pool.submit(self._write, source, buffer, filled, source.end - filled))
        self._buffer = self._free.get()
        self.check()

    def _write(self, into: OpenPack, buffer: memoryview, filled: int, offset: int) -> None:
        try:
            if self._failure is None:
                direct.write_fully(into.fd, buffer[:filled], offset)
        except OSError as error:
            self._failure = self._failure or error
        finally:
            self._free.put(buffer)
            with self._progress:
                into.unwritten -= 1
                self._unwritten -= 1
                last = bool(into.mac) and into.unwritten == 0
                self._progress.notify_all()
        if last and self._failure is None:
            self._settle(into)

    def _settle(self, whole: OpenPack) -> None:
        try:
            os.fsync(whole.fd)
            os.close(self._open.pop(whole.name).fd)
            self._finished(whole)
        except (OSError, TorporError) as error:
            self._failure = self._failure or error
