"""Starting a session without waiting for it: the launcher runs, the loop goes on, the outcome is called back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

from torpor.engine.keeper_loop import Loop
from torpor.engine.keeper_wire import close_all, memory_file

DEADLINE_SECONDS = 60.0
_REPORT_LIMIT = 64 * 1024
_LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher.py")


class Launch:
    """One start in progress. `done(pid, start_time, notes, error)` is called once; with an error, a process that is
    there after all is of no use."""

    def __init__(
        self,
        loop: Loop,
        python: str,
        spec: dict[str, Any],
        stdin: int | None,
        done: Callable[[int, int, list[str], str | None], None],
    ) -> None:
        """Raises OSError when the launcher cannot be started at all; then `done` is not called."""
        self._loop = loop
        self._done = done
        self._identity = bytearray()
        self._report = bytearray()
        self._finished = False
        self._identity_fd, pid_write = os.pipe2(os.O_CLOEXEC)
        self._report_fd, report_write = os.pipe2(os.O_CLOEXEC)
        memory = memory_file(json.dumps(spec).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        given = [memory, pid_write, report_write]
        try:
            spawn_launcher(python, given, stdin)
        except OSError:
            close_all([self._identity_fd, self._report_fd])
            raise
        finally:
            close_all(given)
        loop.watch(self._identity_fd, lambda _events: self._identified())
        loop.watch(self._report_fd, lambda _events: self._reported())
        loop.later(DEADLINE_SECONDS, self._too_late)

    def _identified(self) -> None:
        data = os.read(self._identity_fd, _REPORT_LIMIT)
        self._identity += data
        if not data:
            self._loop.forget(self._identity_fd)
            os.close(self._identity_fd)
            self._identity_fd = -1
            self._conclude()

    def _reported(self) -> None:
        data = os.read(self._report_fd, _REPORT_LIMIT)
        self._report += data
        if not data or b'"ready"' in data or len(self._report) > _REPORT_LIMIT:
            self._loop.forget(self._report_fd)
            os.close(self._report_fd)
            self._report_fd = -1
            self._conclude()

    def _conclude(self) -> None:
        if self._identity_fd >= 0 or self._report_fd >= 0 or self._finished:
            return
        self._finished = True
        notes, error = read_report(bytes(self._report))
        pid, start_time = read_identity(bytes(self._identity))
        if error is None and not pid:
            error = "The launcher ended without a session."
        self._done(pid, start_time, notes, error)

    def _too_late(self) -> None:
        if self._finished:
            return
        self._finished = True
        for fd in (self._identity_fd, self._report_fd):
            if fd >= 0:
                self._loop.forget(fd)
                os.close(fd)
        self._done(
            *read_identity(bytes(self._identity)), [], f"The session did not start within {DEADLINE_SECONDS:.0f} s."
        )


def spawn_launcher(python: str, given: list[int], stdin: int | None) -> int:
    """Start the launcher with these descriptors, under the numbers that they have here; gives its pid."""
    inherited = [*given, *([stdin] if stdin is not None else [])]
    numbers = [str(fd) for fd in given] + [str(-1 if stdin is None else stdin)]
    for fd in inherited:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawn(
            python,
            [python, "-I", "-S", _LAUNCHER, *numbers],
            {"LC_ALL": "C.UTF-8"},
            setsigmask=[],
            setsigdef=default_signals(),
        )
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)


def default_signals() -> set[int]:
    """Signals whose default action what the keeper starts gets back."""
    return {int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}}


def read_report(report: bytes) -> tuple[list[str], str | None]:
    """Notes and the error, if any. The session's own user may have written the last lines, so nothing is trusted."""
    notes: list[str] = []
    ready = False
    for line in report.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(message, dict):
            if "error" in message:
                return notes, str(message["error"])
            if "note" in message:
                notes.append(str(message["note"]))
            ready = ready or message.get("ready") is True
    return notes, None if ready else "The session's first process did not start; see the keeper's log."


def read_identity(identity: bytes) -> tuple[int, int]:
    """Pid and start time of the session's first process as the launcher wrote them, zeros when it wrote none."""
    message = json.loads(identity or b"{}")
    return int(message.get("pid", 0)), int(message.get("start_time", 0))
