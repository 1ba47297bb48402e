"""Serving a session's memory: touched pages first, then the rest, each chunk authenticated before it is delivered.

One thread reads what the kernel tells, a few answer touches, a few bring the rest. The server may be killed at any
moment: the next one starts from the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from torpor.engine import keeper_wire, page_log, userfault
from torpor.engine.lazy_plan import LazyTask, Piece
from torpor.engine.page_bringer import Bringer
from torpor.engine.page_chunks import Chunks
from torpor.engine.page_family import Family, Gate, Waiting
from torpor.engine.page_log import PageLog, Record
from torpor.engine.page_trace import Trace
from torpor.engine.userfault import PAGE
from torpor.store import Store

PROGRESS_INTERVAL = 0.1
SWITCH_INTERVAL = 0.0005  # seconds after which Python lets a touch be answered while something else is computed
RESTORE_FINISHED = 0x52535446  # CRIU's last word, where a pid could be
CRASHED = 70


@dataclass(frozen=True)
class Job:
    """What is to be served, and everything that all servers of it share."""

    tasks: Sequence[LazyTask]
    store: Path
    key: bytes  # the site's
    trace: Path
    listener: socket.socket  # where CRIU connects
    control: socket.socket  # the worker's
    log: PageLog = field(default_factory=PageLog)


class End(Enum):
    """Why a server has ended."""

    COMPLETE = "complete"
    ABANDONED = "abandoned"  # the session was not brought back
    LOST = "lost"
    ALONE = "alone"  # the process that also held the descriptors is gone


class Server:
    """One server; made in the process that serves."""

    def __init__(self, job: Job, companion: int) -> None:
        """`companion` is a pidfd of the process that holds the descriptors too."""
        self._job = job
        self._companion = companion
        self._families = [Family(task) for task in job.tasks]
        self._by_task = {family.task.image_id: family for family in self._families}
        self._waiting: list[tuple[Family, Waiting]] = []
        self._gate = Gate()
        self._trace = Trace(job.trace)
        self._stopping = threading.Event()
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._connection = -1
        self._criu_has_ended = False
        self._seen: set[int] = set()
        self._asked: tuple[set[int], int, int] | None = None
        self._read_log_through = False
        self._chunks = Chunks(job.log, self._news, self._stopping)
        self._bringer = Bringer(
            self._families,
            self._gate,
            self._chunks,
            job.log,
            self._trace,
            self._news,
            self._stopping,
            self._say_progress,
        )
        self._told = 0.0
        self._done = 0
        self.faults = 0

    def run(self) -> End:
        """Serves until everything has arrived, or there is nobody or nothing left to serve."""
        threading.excepthook = _end_at_once
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._take_over()
        with contextlib.ExitStack() as held:
            store = held.enter_context(Store.open(self._job.store, self._job.key))
            held.enter_context(store.reading())
            self._chunks.read = store.read_into
            self._bringer.start()
            for fd in (self._companion, self._news, self._job.control.fileno()):
                self._epoll.register(fd, select.EPOLLIN)
            if self._chunks.init is None:
                self._epoll.register(self._job.listener.fileno(), select.EPOLLIN)
            else:
                self._bringer.fill()
            try:
                return self._serve()
            finally:
                self._stop()

    # What the kernel, CRIU and the worker tell

    @property
    def loss(self) -> str:
        """Why memory is lost, a sentence; empty while it is not."""
        return self._chunks.loss

    def _serve(self) -> End:
        while True:
            for fd, _ in self._epoll.poll():
                end = self._react(fd)
                if end is not None:
                    return end

    def _react(self, fd: int) -> End | None:
        if fd == self._companion:
            return End.ALONE
        if fd == self._news:
            os.eventfd_read(fd)
            return self._look()
        if fd == self._job.control.fileno():
            return None if self._hear() or self._chunks.init is not None else End.ABANDONED
        if fd == self._job.listener.fileno():
            self._accept()
        elif fd == self._connection:
            self._receive_descriptor()
        else:
            self._read_messages(fd)
        return None

    def _look(self) -> End | None:
        """Whether it is over. CRIU must be able to say its last word before."""
        if self.loss:
            return End.LOST
        if self._chunks.init is None:
            return None
        if self._finished():
            return End.COMPLETE if self._criu_has_ended else None
        if self._bringer.idle:
            self._bringer.fill()
        return None

    def _accept(self) -> None:
        connection, _ = self._job.listener.accept()
        self._connection = connection.detach()
        self._job.log.add(0, page_log.CONNECTED, self._connection)
        self._epoll.register(self._connection, select.EPOLLIN)

    def _receive_descriptor(self) -> None:
        """CRIU sends, for each process: its pid (in the session), then its userfaultfd; a negative pid for a zombie."""
        with socket.socket(fileno=os.dup(self._connection)) as connection:
            connection.setblocking(True)
            number = connection.recv(4, socket.MSG_WAITALL)
            if len(number) < 4:
                self._epoll.unregister(self._connection)
                self._criu_has_ended = True
                os.eventfd_write(self._news, 1)
                return
            (pid,) = struct.unpack("<i", number)
            if 0 < pid != RESTORE_FINISHED:
                _, (uffd,), _ = keeper_wire.receive_with_descriptors(connection, 1)
                self._seen.add(pid)
                self._job.log.add(0, page_log.OPENED, pid, uffd)
                self._opened(pid, uffd)
        self._start_if_ready()

    def _hear(self) -> bool:
        """Takes what the worker says; False when it is gone."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            data = self._job.control.recv(1 << 16, socket.MSG_DONTWAIT)
            if data:
                asked = json.loads(data)
                self._asked = (set(asked["tasks"]), asked["init"], asked["start_time"])
                self._start_if_ready()
                return True
        self._epoll.unregister(self._job.control.fileno())
        return False

    def _start_if_ready(self) -> None:
        """Once the tree is restored, and before it runs: every process is known, and the rest may be brought."""
        if self._asked is None or not self._asked[0] <= self._seen or self._chunks.init is not None:
            return
        self._chunks.init = self._asked[1:]
        self._job.log.add(0, page_log.STARTED, *self._chunks.init)
        self._tell({"ready": True})
        self._bringer.fill()

    def _read_messages(self, uffd: int) -> None:
        with self._gate.read():
            found = next(((family, one) for family, one in self._waiting if one.uffd == uffd and not one.gone), None)
            while found is not None and (record := self._job.log.read(uffd, found[1].number)):
                if record.event == userfault.PAGEFAULT:
                    self.faults += 1
                    self._bringer.touched((*found, record.second & -PAGE))
                else:
                    self._apply(record)

    def _apply(self, record: Record) -> None:
        event, first, second, third = record[1:]
        match event:
            case page_log.CONNECTED:
                self._connection = first
            case page_log.OPENED:
                self._opened(first, second)
            case page_log.STARTED:
                self._chunks.init = (first, second)
            case page_log.ARRIVED:
                self._families[first].arrived(Piece(b"", second, third, 0))
            case page_log.CLOSED:
                self._waiting[record.process][1].gone = True
            case page_log.STOPPED:
                self._chunks.stopped.append((first, second))
            case page_log.CONTINUED:
                self._chunks.stopped.clear()
            case userfault.FORK:
                family, parent = self._waiting[record.process]
                self._add(family, first & 0xFFFFFFFF, Waiting(len(self._waiting), 0, parent.pages.copied()))
            case userfault.REMAP:
                self._waiting[record.process][1].pages.remapped(first, second, third)
            case userfault.REMOVE:
                self._waiting[record.process][1].pages.removed(first, second)
            case userfault.UNMAP:
                self._waiting[record.process][1].pages.unmapped(first, second)

    def _opened(self, pid: int, uffd: int) -> None:
        family = self._by_task.get(pid) or Family(LazyTask(pid))
        self._add(family, uffd, Waiting(len(self._waiting), uffd, family.task.new_map()))

    def _add(self, family: Family, uffd: int, one: Waiting) -> None:
        one.uffd = uffd
        family.members.append(one)
        self._waiting.append((family, one))
        if self._read_log_through:
            self._epoll.register(uffd, select.EPOLLIN)

    def _take_over(self) -> None:
        """Everything as the log has it. Threads whose touch nobody answered yet are made to ask again."""
        self._job.log.take_over()
        for record in self._job.log.records():
            self._apply(record)
        self._read_log_through = True
        for family, one in self._waiting:
            if one.gone:
                family.members.remove(one)
            else:
                self._epoll.register(one.uffd, select.EPOLLIN)
                userfault.wake_all(one.uffd)
        if self._connection >= 0:
            self._epoll.register(self._connection, select.EPOLLIN)
        self._chunks.go_on()

    # Around it

    def _finished(self) -> bool:
        """Whether nobody waits for anything any more. Whoever waits for nothing is let go."""
        with self._gate.read():
            for family, one in self._waiting:
                if one in family.members and (one.gone or one.pages.complete):
                    self._job.log.add(one.number, page_log.CLOSED)
                    family.members.remove(one)
                    one.gone = True
                    os.close(one.uffd)
            return not any(family.members for family, _ in self._waiting)

    def _stop(self) -> None:
        """Ends all threads at a clean point."""
        self._stopping.set()
        self._bringer.stop()
        self._epoll.close()
        os.close(self._news)

    def _say_progress(self, done: int) -> None:
        self._done += done
        if time.monotonic() - self._told > PROGRESS_INTERVAL:
            self._told = time.monotonic()
            self._tell({"done": self._done, "total": sum(task.size for task in self._job.tasks)})

    def _tell(self, news: dict[str, object]) -> None:
        """Tells the worker, who need not be there any more."""
        with contextlib.suppress(OSError):
            self._job.control.send(json.dumps(news).encode(), socket.MSG_DONTWAIT)

    def keep_trace(self) -> None:
        """Stores the order of touches for the next time. Raises OSError."""
        self._trace.store()


def _end_at_once(failed: threading.ExceptHookArgs) -> None:
    """A server that cannot go on is no use half alive: the next one takes over."""
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    os._exit(CRASHED)
