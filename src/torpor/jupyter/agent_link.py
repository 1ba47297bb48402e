"""The relay's line to the agent: calls are made in threads, what comes back is an event in a mailbox.

The relay's loop never waits for the agent. `SessionControl` is all that the relay needs of it, for one session.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Condition, Event, Thread
from typing import Any, Protocol

import msgspec

from torpor.client import Client
from torpor.errors import AgentUnreachable, NotFound, TorporError
from torpor.model import Kernel, State

WATCH_SECONDS = 30.0
RETRY_SECONDS = 0.3
log = logging.getLogger(__name__)


class Seen(msgspec.Struct, frozen=True):
    """A session as the relay looks at it. Also the event that it changed."""

    id: str
    state: State
    version: int
    lease: int = 0
    exit_status: int | None = None
    lost: str | None = None


@dataclass(frozen=True)
class Gone:
    """Event: the agent answers, and there is no such session."""


@dataclass(frozen=True)
class Unreachable:
    """Event: the agent did not answer; it is asked again and again."""


@dataclass(frozen=True)
class Progress:
    """Event: how far an operation has come. `done` and `total` are bytes, 0 when not known."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class OperationEnded:
    """Event: an operation that the relay asked for has ended; `error` is None when it was done."""

    kind: str
    error: TorporError | None


LinkEvent = Seen | Gone | Unreachable | Progress | OperationEnded


class SessionControl(Protocol):
    """What the relay asks of the agent. Every method may block, and raises TorporError."""

    def watch(self, version: int, timeout: float) -> Seen:
        """The session as soon as its version is greater, or as it is after `timeout` seconds."""

    def operation(self, kind: str) -> Iterator[dict[str, Any]]:
        """Runs `resume`, or `hibernate` if the kernel is idle; yields progress events, then the result."""

    def report(self, kernel: Kernel) -> None:
        """Tells what the relay knows of its kernel."""

    def quiesced(self, version: int, ok: bool, reason: str, *, lossless: bool) -> None:
        """Answers state `hibernating`. `lossless`: what is in flight is saved with the session."""

    def answered(self, version: int) -> None:
        """The kernel has answered after a resume."""

    def signal(self, signum: int) -> None:
        """Sends a signal to the kernel's process group."""

    def end(self) -> None:
        """Ends the session; its checkpoints are kept."""


class AgentSession:
    """SessionControl of a session that the agent has."""

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._session = session

    def watch(self, version: int, timeout: float) -> Seen:
        """The session as soon as its version is greater, or as it is after `timeout` seconds."""
        return msgspec.convert(self._client.watch(self._session, version, timeout), Seen)

    def operation(self, kind: str) -> Iterator[dict[str, Any]]:
        """Runs `resume`, or `hibernate` if the kernel is idle; yields progress events, then the result."""
        return self._client.operation(self._session, kind, if_idle=kind == "hibernate")

    def report(self, kernel: Kernel) -> None:
        """Tells what the relay knows of its kernel."""
        facts = msgspec.to_builtins(kernel)
        del facts["heard"]
        self._client.put_kernel(self._session, facts)

    def quiesced(self, version: int, ok: bool, reason: str, *, lossless: bool) -> None:
        """Answers state `hibernating`. `lossless`: what is in flight is saved with the session."""
        self._client.quiesced(self._session, version, ok, reason, lossless=lossless)

    def answered(self, version: int) -> None:
        """The kernel has answered after a resume."""
        self._client.answered(self._session, version)

    def signal(self, signum: int) -> None:
        """Sends a signal to the kernel's process group."""
        self._client.signal(self._session, signum)

    def end(self) -> None:
        """Ends the session; its checkpoints are kept."""
        self._client.end(self._session, keep=True)


class Mailbox:
    """Events from threads to a loop that polls `fileno`."""

    def __init__(self) -> None:
        self._events: deque[LinkEvent] = deque()
        self._bell, self._button = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._bell

    def post(self, event: LinkEvent) -> None:
        """Puts an event in; called by any thread."""
        self._events.append(event)
        try:
            os.write(self._button, b"!")
        except BlockingIOError:
            return  # the pipe is full of rings that nobody has heard yet

    def drain(self) -> list[LinkEvent]:
        """Takes all events out."""
        try:
            os.read(self._bell, 1 << 16)
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]


class AgentLink:
    """Watches one session and runs errands for the relay's loop, in order, in threads of its own."""

    def __init__(self, control: SessionControl, mailbox: Mailbox) -> None:
        self._control = control
        self._mailbox = mailbox
        self._errands: deque[tuple[Callable[[], None], float]] = deque()  # what to do, until when to try
        self._report: Kernel | None = None
        self._work = Condition()
        self._stopped = Event()

    def start(self, version: int = -1) -> None:
        """Watches from `version` on, and takes errands."""
        Thread(target=self._watch, args=(version,), name="watch", daemon=True).start()
        Thread(target=self._run_errands, name="errands", daemon=True).start()

    def stop(self) -> None:
        """Takes no more errands. The threads end with the process."""
        self._stopped.set()
        with self._work:
            self._work.notify()

    def report(self, kernel: Kernel) -> None:
        """Tells the agent this, unless something newer comes before its turn. Not retried: the next one will do."""
        with self._work:
            self._report = kernel
            self._work.notify()

    def quiesced(self, version: int, ok: bool, reason: str, *, lossless: bool) -> None:
        """Answers state `hibernating`. `lossless`: what is in flight is saved with the session."""
        self._errand(lambda: self._control.quiesced(version, ok, reason, lossless=lossless), patience=60.0)

    def answered(self, version: int) -> None:
        """Says that the kernel has answered after a resume."""
        self._errand(lambda: self._control.answered(version), patience=60.0)

    def signal(self, signum: int) -> None:
        """Sends a signal to the kernel."""
        self._errand(lambda: self._control.signal(signum), patience=5.0)

    def end(self) -> None:
        """Ends the session, whatever it is in the middle of. OperationEnded("end") tells when that is done."""
        Thread(target=self._end, name="end", daemon=True).start()

    def operation(self, kind: str) -> None:
        """Starts `resume` or `hibernate`. Progress and OperationEnded come as events."""
        Thread(target=self._operate, args=(kind,), name=kind, daemon=True).start()

    def _errand(self, act: Callable[[], None], patience: float) -> None:
        with self._work:
            self._errands.append((act, time.monotonic() + patience))
            self._work.notify()

    def _watch(self, version: int) -> None:
        lost = False
        while not self._stopped.is_set():
            try:
                seen = self._control.watch(version, WATCH_SECONDS)
            except NotFound:
                self._mailbox.post(Gone())
                return
            except TorporError as error:
                log.debug("watch: %s", error)
                lost = True
                self._mailbox.post(Unreachable())
                self._stopped.wait(RETRY_SECONDS)
                continue
            if lost or seen.version != version:
                version, lost = seen.version, False
                self._mailbox.post(seen)

    def _run_errands(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._errands or self._report or self._stopped.is_set())
                if self._stopped.is_set():
                    return
                if self._errands:
                    act, until = self._errands.popleft()
                elif self._report:
                    act, until = partial(self._control.report, self._report), 0.0
                    self._report = None
                else:
                    continue
            self._try(act, until)

    def _try(self, act: Callable[[], None], until: float) -> None:
        while not self._stopped.is_set():
            try:
                return act()
            except AgentUnreachable as error:
                if time.monotonic() > until:
                    log.debug("%s", error)
                    return None
                self._stopped.wait(RETRY_SECONDS)
            except TorporError as error:
                log.warning("%s", error)
                return None
        return None

    def _operate(self, kind: str) -> None:
        failure: TorporError | None = None
        try:
            for event in self._control.operation(kind):
                if event.get("event") == "progress":
                    done, total = int(event.get("done") or 0), int(event.get("total") or 0)
                    self._mailbox.post(Progress(str(event.get("phase", "")), done, total))
        except TorporError as error:
            failure = error
        self._mailbox.post(OperationEnded(kind, failure))

    def _end(self) -> None:
        failure: TorporError | None = None
        while not self._stopped.is_set():
            try:
                self._control.end()
                failure = None
            except NotFound:
                failure = None
            except TorporError as error:  # in the middle of an operation, or the agent is being restarted
                failure = error
                log.debug("end: %s", error)
                self._stopped.wait(RETRY_SECONDS)
                continue
            break
        self._mailbox.post(OperationEnded("end", failure))
