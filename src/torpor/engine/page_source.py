"""The page source of one resume: two processes that outlive everybody and hold the session's userfaultfds.

A *guardian* and a *server* share one table of descriptors: as long as one of them lives, every userfaultfd stays open,
also one that the server has received this very moment for a forked child. The death of the server makes touches wait
until the guardian has cloned the next one, which starts from the log; a server whose guardian dies becomes one.

Who waits for the end waits for the lock on the report's file, which the two hold, and reads the report.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from torpor.engine import keeper_wire, page_log, procfs, userfault
from torpor.engine.lazy_plan import LazyTask
from torpor.engine.page_chunks import send_signal
from torpor.engine.page_server import CRASHED, End, Job, Server
from torpor.errors import EngineError, IntegrityError
from torpor.model import ProcessId

SOCKET = "lazy-pages.socket"  # CRIU's name for it, in the folder of its images
READY_DEADLINE = 30.0
OWN_FAILURES = 3  # of servers that ended by themselves; those that were killed do not count
SERVER_NAME, GUARDIAN_NAME = "torpor-pages", "torpor-pages-2"


class Report(msgspec.Struct):
    """How a page source has ended. `loss` is a sentence; `seconds` since the session was let run."""

    end: str = End.LOST.value
    loss: str = ""
    faults: int = 0

    @property
    def lost(self) -> bool:
        """Whether memory was lost, and the session ended."""
        return self.end == End.LOST.value


class Order(msgspec.Struct):
    """What the worker tells the process that is to become the page source."""

    tasks: list[LazyTask]
    store: str
    key: bytes
    trace: str


class PageSource:
    """The worker's side of it. Made first of all: SQLite must not have been used in a process that is forked."""

    def __init__(self) -> None:
        """Forks, while the caller has one thread and no open file, the process that becomes the page source if `serve`
        is called, and ends otherwise."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._report: Path | None = None
        child = os.fork()
        if child == 0:
            self._ours.close()
            _detached(theirs)
        os.waitpid(child, 0)
        theirs.close()

    @property
    def serves(self) -> bool:
        """Whether memory arrives late."""
        return self._report is not None

    def serve(self, folder: Path, tasks: list[LazyTask], store: Path, key: bytes, *, trace: Path, report: Path) -> None:
        """From now on CRIU finds the page source in `folder`, that of its images; `report` must not exist. The site's
        `key` opens the store. Raises OSError."""
        report.parent.mkdir(mode=0o700, exist_ok=True)
        held = os.open(report, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        self._report = report
        order = keeper_wire.memory_file(msgspec.msgpack.encode(Order(tasks, str(store), key, str(trace))))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / SOCKET))
            listener.listen()
            keeper_wire.send_with_descriptors(self._ours, b"serve", [order, listener.fileno(), held])
        os.close(order)
        os.close(held)

    def ready(self, init: ProcessId) -> None:
        """Returns once every process of the restored tree is served; it may run then.

        Raises EngineError, or IntegrityError when memory that it needed already is lost."""
        tasks = [procfs.nspid(pid) for pid in procfs.tree(init.pid)]
        asked = {"tasks": tasks, "init": init.pid, "start_time": init.start_time}
        self._ours.settimeout(READY_DEADLINE)
        try:
            self._ours.send(json.dumps(asked).encode())
            answer = self._ours.recv(1 << 16)
        except OSError as error:
            raise EngineError(f"The page source did not answer: {error}.") from error
        if not answer:
            assert self._report is not None
            loss = wait_for_report(self._report).loss
            raise IntegrityError(loss) if loss else EngineError("The page source has ended.")

    def wait(self, progress: Callable[[int, int], None]) -> Report:
        """Waits until everything has arrived, or was lost. `progress(bytes done, bytes in all)`."""
        self._ours.settimeout(None)
        with contextlib.suppress(ConnectionError):
            while data := self._ours.recv(1 << 16):
                news = json.loads(data)
                progress(int(news["done"]), int(news["total"]))
        assert self._report is not None
        return wait_for_report(self._report)

    def close(self) -> None:
        """The page source ends, unless the session runs; returns when it has."""
        self._ours.close()
        if self._report is not None:
            wait_for_report(self._report)


def wait_for_report(path: Path) -> Report:
    """Waits until the page source that reports there has ended. One that left no report was killed altogether, and the
    memory that had not arrived is lost; without a file there was none, and everything has been there all the time."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return Report(End.COMPLETE.value)
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        data = file.read()
    if not data:
        return Report(loss="Every process that held memory for it was killed.")
    return msgspec.json.decode(data, type=Report)


def _detached(control: socket.socket) -> NoReturn:
    """In the forked child: a session of its own, no parent, no descriptor that is not needed."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        gc.freeze()  # what the worker left must not close descriptors that are others' here
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(nothing, standard)
        _close_others({0, 1, 2, control.fileno()})
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asked, descriptors, _ = keeper_wire.receive_with_descriptors(control, 64)
        if asked:
            order, listener, report = descriptors
            wanted = msgspec.msgpack.decode(keeper_wire.read_memory_file(order), type=Order)
            listening = socket.socket(fileno=listener)
            _guard(Job(wanted.tasks, Path(wanted.store), wanted.key, Path(wanted.trace), listening, control), report)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - nothing of the worker may go on in this process
        traceback.print_exc()
    os._exit(CRASHED)


def _guard(job: Job, report: int) -> NoReturn:
    """Clones servers until one of them has come to an end."""
    own_failures = 0
    while True:
        _call_me(GUARDIAN_NAME)
        _close_others({0, 1, 2, job.listener.fileno(), job.control.fileno(), report, *_logged(job)})
        companion = os.pidfd_open(os.getpid())
        server = userfault.clone_sharing_descriptors()
        if server == 0:
            _serve(job, companion, report)
            own_failures = 0
            continue  # the guardian is dead: this is the guardian now
        _, status = os.waitpid(server, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            os._exit(0)
        own_failures += code > 0
        if not _started(job):
            _tell(report, Report(End.ABANDONED.value))
            os._exit(1)
        if own_failures >= OWN_FAILURES:
            _end_session(job)
            _tell(report, Report(loss="The page source failed; its log says how."))
            os._exit(1)


def _serve(job: Job, companion: int, report: int) -> None:
    """In the cloned process. Returns when its guardian is dead, and all its own threads have ended."""
    try:
        _call_me(SERVER_NAME)
        server = Server(job, companion)
        end = server.run()
        if end is End.ALONE:
            return
        if end is End.LOST:
            _end_session(job)
        else:
            server.keep_trace()
        _tell(report, Report(end.value, server.loss, server.faults))
    except BaseException:  # noqa: BLE001 - the guardian starts another one
        traceback.print_exc()
        os._exit(CRASHED)
    os._exit(0)


def _logged(job: Job) -> set[int]:
    """Descriptors that the log says are in use."""
    job.log.take_over()
    found: dict[int, int] = {}
    kept: set[int] = set()
    for record in job.log.records():
        match record.event:
            case page_log.CONNECTED:
                kept.add(record.first)
            case page_log.OPENED:
                found[len(found)] = record.second
            case userfault.FORK:
                found[len(found)] = record.first & 0xFFFFFFFF
            case page_log.CLOSED:
                found[record.process] = -1
    return kept | set(found.values())


def _started(job: Job) -> tuple[int, int] | None:
    """The session's init, once it runs."""
    for record in job.log.records():
        if record.event == page_log.STARTED:
            return record.first, record.second
    return None


def _end_session(job: Job) -> None:
    """Ends the session whose memory cannot be had, and waits until nothing of it runs."""
    init = _started(job)
    if init is None:
        return
    send_signal(*init, signal.SIGKILL)
    while procfs.alive(*init, procfs.boot_id()):
        time.sleep(0.01)


def _tell(report: int, told: Report) -> None:
    os.pwrite(report, msgspec.json.encode(told), 0)


def _close_others(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


def _call_me(name: str) -> None:
    Path("/proc/self/comm").write_text(name)
