"""An operation in progress, for everybody who waits for it; and the worker that carries it out."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from torpor.engine import procfs
from torpor.errors import NotFound
from torpor.model import Operation, ProcessId

logger = logging.getLogger(__name__)

LINE_LIMIT = 1 << 20  # bytes of one line of a worker; a longer one is dropped


class Running:
    """One operation in progress. Slow listeners miss intermediate progress, never the end."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._progress: dict[str, Any] | None = None
        self._told = 0
        self._news = asyncio.Event()
        self._ended = False

    def tell(self, progress: dict[str, Any]) -> None:
        """Passes progress on to the listeners."""
        self._progress = progress
        self._told += 1
        self._wake()

    def conclude(self, operation: Operation) -> None:
        """Passes the end on; `operation` is the journal's last word."""
        self.operation = operation
        self._ended = True
        self._wake()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Progress events as they come, then one result or error event."""
        seen = 0
        while not self._ended:
            if self._told != seen and self._progress is not None:
                seen = self._told
                yield self._progress
            else:
                await self._news.wait()
        yield outcome(self.operation)

    async def ended(self) -> Operation:
        """Waits for the end."""
        while not self._ended:
            await self._news.wait()
        return self.operation

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def outcome(operation: Operation) -> dict[str, Any]:
    """The last event of an operation: what it made, or why it was undone."""
    if operation.outcome == "completed":
        return {"event": "result", "operation": operation.id, **(operation.result or {})}
    error = operation.error or {
        "code": "internal",
        "message": f"The {operation.kind} was undone.",
        "safe": "The session is as it was before.",
        "hint": "",
    }
    return {"event": "error", "error": error}


async def follow_worker(worker: ProcessId, output: int | None, tell: Callable[[dict[str, Any]], None]) -> None:
    """Returns when the worker has ended. `output` is the reading end of its standard output; it is closed here.

    The end is the process's end, by pidfd: a child of the worker may keep the pipe open.
    """
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    lines = _Lines(output, tell) if output is not None else None
    try:
        pidfd = _pidfd(worker)
        if pidfd is not None:
            loop.add_reader(pidfd, gone.set)
            if lines is not None:
                loop.add_reader(lines.descriptor, lines.read)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        if lines is not None:
            lines.drain()
    finally:
        if lines is not None:
            lines.close()


def worker_command(operation_id: str) -> list[str]:
    """What the worker of an operation is started with."""
    return [sys.executable, "-m", "torpor.sessions.worker", operation_id]


def find_worker(operation_id: str) -> ProcessId | None:
    """The live worker of an operation whose journal does not name it: the agent died between start and note.

    Anybody may write such a command line; only root's own processes count, and set-user-id programs are not that.
    """
    expected = [*worker_command(operation_id)[1:], ""]
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                arguments = os.fsdecode(file.read()).split("\0")
            if arguments[1:] != expected or set(procfs.uids(int(entry))) != {os.geteuid()}:
                continue
        except (OSError, NotFound):
            continue  # ended meanwhile
        start_time = procfs.start_time(int(entry))
        if start_time is not None:
            return ProcessId(int(entry), start_time, procfs.boot_id())
    return None


def is_alive(process: ProcessId | None) -> bool:
    """Whether this very process (not another with its pid) is there."""
    return process is not None and procfs.alive(process.pid, process.start_time, process.boot_id)


class _Lines:
    """The worker's lines, read without ever blocking the loop."""

    def __init__(self, descriptor: int, tell: Callable[[dict[str, Any]], None]) -> None:
        self.descriptor = descriptor
        self._tell = tell
        self._rest = b""
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Takes what is there; False when there is nothing now or ever."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self.descriptor)
            return False
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest if len(self._rest) <= LINE_LIMIT else b""
        for line in whole:
            self._pass_on(line)
        return True

    def drain(self) -> None:
        while self.read():
            pass

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.descriptor)
        os.close(self.descriptor)

    def _pass_on(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            logger.warning("A worker printed a line that is no JSON: %r", line[:200])
            return
        if isinstance(event, dict) and event.get("event") == "progress":
            self._tell(event)


def _pidfd(process: ProcessId) -> int | None:
    """A pidfd of exactly this process; None when it has ended."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_alive(process):
        return pidfd
    os.close(pidfd)
    return None
