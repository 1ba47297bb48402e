"""A command on a real pseudo-terminal, typed at and read like a person would."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

from tests.installation import PATIENCE, Installation


class Terminal:
    """`torpor ARGUMENTS` as the foreground process of a terminal of its own."""

    def __init__(self, agent: Installation, *arguments: str, rows: int = 24, columns: int = 80) -> None:
        self.master, slave = os.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.command = subprocess.Popen(
            ["setsid", "--ctty", "--wait", sys.executable, "-m", "torpor", *arguments],
            env={**agent.environment, "TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, wanted: str) -> str:
        """Everything shown so far, once it contains `wanted`."""
        deadline = time.monotonic() + PATIENCE
        while wanted.encode() not in self.seen:
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.seen!r}"
            self._read(0.1)
        return self.seen.decode()

    def wait(self) -> int:
        """The exit status of the command; everything it showed is in `seen` then."""
        deadline = time.monotonic() + PATIENCE
        while self.command.poll() is None:
            assert time.monotonic() < deadline, f"still running after {self.seen!r}"
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.command.wait()

    def modes(self) -> list[object]:
        """The terminal's modes as they are now."""
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        if self.command.poll() is None:
            self.command.kill()
            self.command.wait()
        os.close(self.master)
        os.close(self._slave)

    def _read(self, patience: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], patience)
        if ready:
            self.seen += os.read(self.master, 1 << 16)
        return bool(ready)


@contextlib.contextmanager
def terminal(agent: Installation, *arguments: str, rows: int = 24, columns: int = 80) -> Iterator[Terminal]:
    """A terminal that is closed afterwards, its command ended."""
    opened = Terminal(agent, *arguments, rows=rows, columns=columns)
    try:
        yield opened
    finally:
        opened.close()
