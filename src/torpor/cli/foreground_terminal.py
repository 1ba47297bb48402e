"""A session in the foreground on a terminal: ours in raw mode, the session's held by the keeper."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torpor.cli.foreground import RETRY, End, Signals, attach
from torpor.client import Client
from torpor.errors import TorporError

HEADER = struct.Struct(">cI")
PIECE = 1 << 16
LOOK = 0.5  # seconds after which the session's end is looked for, should nobody tell


def stay(client: Client, session: dict[str, Any]) -> int:
    """Stays with the session until it has ended; gives its exit status. Our terminal is as before afterwards."""
    signals = Signals()
    end = End(client, session)
    shown = 0
    try:
        with _raw_terminal(), _resizes() as resized:
            while True:
                try:
                    attached = _Attached(client, session["id"], shown)
                except (OSError, TorporError):
                    status = end.status()
                    if status is not None:
                        return status
                    end.wait(RETRY)  # the keeper is being replaced
                    continue
                status = attached.pump(client, session["id"], signals, resized)
                shown = attached.shown
                if status is not None:
                    return status
                if attached.over:
                    return _final(end)
    finally:
        signals.restore()


class _Attached:
    """One connection to the keeper. `shown` counts the bytes of the session's log that were shown."""

    def __init__(self, client: Client, session_id: str, shown: int) -> None:
        self._connection, answer, self._received, _ = attach(client, {"session": session_id, "from": shown})
        self.shown: int = answer["position"]
        self.over = False  # ended with a status that the keeper does not know

    def pump(self, client: Client, session_id: str, signals: Signals, resized: int) -> int | None:
        """Moves bytes both ways until the session ends (its status) or the keeper goes away (None)."""
        waiting: list[Any] = [self._connection, 0, resized]
        self._resize()
        try:
            while not self.over:
                status = self._take_frames()
                if status is not None:
                    return status
                signals.pass_on(client, session_id)
                ready, _, _ = select.select(waiting, [], [], LOOK)
                if resized in ready:
                    os.read(resized, PIECE)
                    self._resize()
                if 0 in ready and not self._type():
                    waiting.remove(0)
                if self._connection in ready and not self._receive():
                    return None
        except (ConnectionError, BrokenPipeError):
            return None
        finally:
            self._connection.close()
        return None

    def _receive(self) -> bool:
        data = self._connection.recv(PIECE)
        self._received += data
        return bool(data)

    def _take_frames(self) -> int | None:
        while len(self._received) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._received)
            end = HEADER.size + length
            if len(self._received) < end:
                return None
            payload, self._received = self._received[HEADER.size : end], self._received[end:]
            if kind == b"d":
                self.shown += len(payload)
                _show(payload)
            elif kind == b"x" and payload.isdigit():
                return int(payload)
            elif kind == b"x":
                self.over = True
        return None

    def _type(self) -> bool:
        try:
            typed = os.read(0, PIECE)
        except OSError:
            return False  # our terminal has gone
        if typed:
            self._send(b"d", typed)
        return bool(typed)

    def _resize(self) -> None:
        columns, rows = os.get_terminal_size(1)
        self._send(b"r", f"{max(rows, 1)} {max(columns, 1)}".encode())

    def _send(self, kind: bytes, payload: bytes) -> None:
        self._connection.sendall(HEADER.pack(kind, len(payload)) + payload)


def _show(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _final(end: End) -> int:
    while (status := end.status()) is None:
        end.wait(LOOK)
    return status


@contextmanager
def _raw_terminal() -> Iterator[None]:
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _resizes() -> Iterator[int]:
    """A descriptor that becomes readable when our terminal's size changes, and with every other signal, too."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    reading.setblocking(False)
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    former = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield reading.fileno()
    finally:
        signal.set_wakeup_fd(former)
        signal.signal(signal.SIGWINCH, before)
        reading.close()
        writing.close()
