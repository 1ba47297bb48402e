"""A session's pseudo-terminal as the keeper holds it: output into out.log, typed input into the session.

The log is the only buffer of output: attached clients read it, each at its own pace, so that a slow one
holds up neither the session nor the others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import termios
from typing import Protocol

from torpor.engine.keeper_loop import HUNG_UP, Loop

INPUT_LIMIT = 64 * 1024
_READ = 64 * 1024
_TIOCGPTPEER, _TIOCGPTN = 0x5441, 0x80045430


class TerminalOwner(Protocol):
    """Whom a terminal tells what happens on it."""

    def output_came(self, unlogged: bytes) -> None:
        """The log has grown, or could not take `unlogged`."""

    def input_waits(self) -> None:
        """Input arrived while the session is away."""

    def input_taken(self) -> None:
        """The session took input, so there may be room for more."""


class Terminal:
    """Holds the master and, so that it never hangs up while the session is there, the session's side too."""

    def __init__(self, loop: Loop, master: int, log: int, owner: TerminalOwner) -> None:
        """Takes over `master` and `log` (open for appending and reading). Raises OSError when `master` is none."""
        self.path = slave_path(master)
        self.log = log
        self.away = False
        self._master = master
        self._slave = open_slave(master)
        self._loop = loop
        self._owner = owner
        self._waiting = bytearray()
        self._moving = False
        self._log_failed = False
        os.set_blocking(master, False)

    @property
    def master(self) -> int:
        """The master's descriptor. Raises ValueError after the session's end."""
        if self._master < 0:
            raise ValueError("The session has ended and so has its terminal.")
        return self._master

    @property
    def ended(self) -> bool:
        """Whether the session has ended and only its log is left."""
        return self._master < 0

    @property
    def has_room(self) -> bool:
        """Whether more input may be typed; a client is not read from while there is none."""
        return len(self._waiting) < INPUT_LIMIT

    @property
    def has_input(self) -> bool:
        """Whether input has been typed that the session has not taken yet."""
        return bool(self._waiting)

    def start(self) -> None:
        """Begin moving bytes, or go on after a hang-up because the session is back on its terminal."""
        slave = open_slave(self.master)  # a hang-up has made the old one useless
        os.close(self._slave)
        self._slave = slave
        self._moving = True
        self._write()

    def type(self, data: bytes) -> None:
        """Give input to the session, or keep it while the session is away or does not read."""
        first = not self._waiting
        self._waiting += data
        if not self.away:
            self._write()
        elif first and data:
            self._owner.input_waits()

    def resize(self, rows: int, columns: int) -> None:
        """Set the size; the kernel tells the foreground processes."""
        set_size(self.master, rows, columns)

    def end(self) -> None:
        """Take the last output and let the terminal go; the log stays readable."""
        if self._master >= 0:
            while self._read():
                pass
            self._stop_moving()
            os.close(self._master)
            os.close(self._slave)
            self._master = -1
            self._waiting.clear()

    def close(self) -> None:
        """Let everything go."""
        self.end()
        os.close(self.log)

    def _ready(self, events: int) -> None:
        read = self._read()
        if events & HUNG_UP and not read:
            self._stop_moving()  # a hung-up master is always ready: leave it alone until the session is back
        else:
            self._write()

    def _read(self) -> bool:
        try:
            data = os.read(self._master, _READ)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False  # hung up
        if data:
            self._owner.output_came(self._append(data))
        return bool(data)

    def _append(self, data: bytes) -> bytes:
        """Returns what the log could not take: a full disk must not silence a shell."""
        try:
            written = os.write(self.log, data)
        except OSError as error:
            written = 0
            if not self._log_failed:
                print(f"out.log of {self.path} takes no more output: {error}", file=sys.stderr, flush=True)
        self._log_failed = written < len(data)
        return data[written:]

    def _write(self) -> None:
        if not self._moving:
            return
        if self._waiting and not self.away:
            try:
                del self._waiting[: os.write(self._master, self._waiting)]
                self._owner.input_taken()
            except BlockingIOError:
                pass  # the session does not read at present; the loop says when it does
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                self._stop_moving()
                return
        self._loop.watch(self._master, self._ready, write=bool(self._waiting) and not self.away)

    def _stop_moving(self) -> None:
        self._loop.forget(self._master)
        self._moving = False


def open_terminal(uid: int, rows: int, columns: int) -> int:
    """The master of a new pseudo-terminal whose session side belongs to `uid`."""
    master, slave = os.openpty()
    try:
        os.fchown(slave, uid, -1)
        os.fchmod(slave, 0o600)
        set_size(master, rows, columns)
    finally:
        os.close(slave)
    return master


def open_slave(master: int) -> int:
    """A new descriptor of the session's side."""
    return fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)


def slave_path(master: int) -> str:
    """Where the session's side is found, such as `/dev/pts/3`. Raises OSError when `master` is no such master."""
    number = fcntl.ioctl(master, _TIOCGPTN, b"\0" * 4)
    return f"/dev/pts/{struct.unpack('I', number)[0]}"


def set_size(master: int, rows: int, columns: int) -> None:
    """Rows and columns, of characters."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
