"""Clients of the attach socket: any user's processes, so nothing they send or fail to read may harm the keeper.

A client names its session in one JSON line and gets one back. Then frames go both ways: one byte of kind, four
bytes of big-endian length, payload. `d` is data, `r` a size ("rows columns"), `x` the exit status.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from torpor.engine.keeper_loop import HUNG_UP, Loop
from torpor.engine.keeper_terminal import INPUT_LIMIT, Terminal
from torpor.engine.keeper_wire import send_with_descriptors

GREETING_LIMIT = 4096
GREETING_SECONDS = 10.0
FRAME_LIMIT = INPUT_LIMIT
CLIENTS_PER_USER = 64
UNSENT_LIMIT = 256 * 1024
_HEADER = struct.Struct(">cI")
_CHUNK = 64 * 1024


class AttachClient:
    """One connection. `greet(client, request)` answers the first line, by `refuse`, `accept` or `hand_over`."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        greet: Callable[[AttachClient, dict[str, Any]], None],
        closed: Callable[[AttachClient], None],
    ) -> None:
        sock.setblocking(False)
        self.uid = peer_uid(sock)
        self._loop = loop
        self._sock = sock
        self._greet = greet
        self._closed = closed
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._terminal: Terminal | None = None
        self._position = 0
        self._exit_status: str | None = None
        self._ending = False
        self._open = True
        loop.watch(sock.fileno(), self._ready)
        loop.later(GREETING_SECONDS, self._close_if_silent)

    def refuse(self, reason: str) -> None:
        """Answer that it cannot be, and close."""
        self._finish_with({"ok": False, "error": reason})

    def hand_over(self, fd: int) -> None:
        """Answer with a descriptor, and close."""
        try:
            send_with_descriptors(self._sock, b'{"ok": true}\n', [fd])
        finally:
            self.close()

    def accept(self, terminal: Terminal, position: int | None) -> None:
        """Attach to a terminal: its log from byte `position` (None: from its present end), then what follows."""
        size = os.fstat(terminal.log).st_size
        self._terminal = terminal
        self._position = size if position is None else min(position, size)
        self._outgoing += json.dumps({"ok": True, "position": self._position}).encode() + b"\n"
        self._send()

    def output(self, unlogged: bytes) -> None:
        """The log has grown; `unlogged` is what it could not take, sent at once unless this client is far behind."""
        if unlogged and len(self._outgoing) < UNSENT_LIMIT:
            self._fill_from_log()
            self._add_frame(b"d", unlogged)
        self._send()

    def exited(self, status: int | None) -> None:
        """The session has ended: say so after its last output, then close."""
        self._exit_status = "" if status is None else str(status)
        self._send()

    def room(self) -> None:
        """The terminal may have taken input: take up what was held back."""
        if self._open and self._terminal is not None:
            self._guarded(self._take_frames)
            self._update()

    def close(self) -> None:
        """Close the connection; once is enough, more is harmless."""
        if self._open:
            self._open = False
            self._loop.forget(self._sock.fileno())
            self._sock.close()
            self._closed(self)

    def _ready(self, events: int) -> None:
        if events & HUNG_UP and not self._may_receive():
            self.close()
            return
        self._guarded(self._receive)
        self._send()

    def _receive(self) -> None:
        if not self._may_receive():
            return
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        if self._ending:
            return
        self._incoming += data
        if self._terminal is None:
            self._take_greeting()
        if self._terminal is not None:
            self._take_frames()

    def _take_greeting(self) -> None:
        line, newline, rest = self._incoming.partition(b"\n")
        if not newline:
            if len(self._incoming) > GREETING_LIMIT:
                raise ValueError("The first line is too long.")
            return
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("The first line is not a JSON object.")
        self._incoming = rest
        self._greet(self, request)

    def _take_frames(self) -> None:
        terminal = self._terminal
        while terminal is not None and terminal.has_room and len(self._incoming) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._incoming)
            if length > FRAME_LIMIT or kind not in (b"d", b"r"):
                raise ValueError("Not a frame.")
            end = _HEADER.size + length
            if len(self._incoming) < end:
                return
            payload = bytes(self._incoming[_HEADER.size : end])
            del self._incoming[:end]
            if kind == b"d":
                terminal.type(payload)
            else:
                rows, columns = (int(number) for number in payload.split())
                terminal.resize(*checked_size(rows, columns))

    def _send(self) -> None:
        self._guarded(self._send_some)
        self._update()

    def _send_some(self) -> None:
        while self._open:
            if not self._outgoing:
                self._fill_from_log()
            if not self._outgoing:
                if self._exit_status is not None and not self._ending and self._terminal is not None:
                    self._add_frame(b"x", self._exit_status.encode())
                    self._ending = True
                    continue
                if self._ending:
                    self.close()
                return
            try:
                del self._outgoing[: self._sock.send(self._outgoing, socket.MSG_NOSIGNAL)]
            except BlockingIOError:
                return

    def _fill_from_log(self) -> None:
        if self._terminal is None or self._ending:
            return
        data = os.pread(self._terminal.log, _CHUNK, self._position)
        if data:
            self._position += len(data)
            self._add_frame(b"d", data)
        else:  # its owner may have emptied the log
            self._position = min(self._position, os.fstat(self._terminal.log).st_size)

    def _add_frame(self, kind: bytes, payload: bytes) -> None:
        self._outgoing += _HEADER.pack(kind, len(payload)) + payload

    def _finish_with(self, answer: dict[str, Any]) -> None:
        self._outgoing += json.dumps(answer).encode() + b"\n"
        self._ending = True
        self._send()

    def _may_receive(self) -> bool:
        return self._terminal is None or (self._terminal.has_room and len(self._incoming) <= FRAME_LIMIT + _HEADER.size)

    def _update(self) -> None:
        if self._open:
            self._loop.watch(self._sock.fileno(), self._ready, read=self._may_receive(), write=bool(self._outgoing))

    def _guarded(self, action: Callable[[], None]) -> None:
        """A client that breaks the rules, or its connection, loses this connection and nothing else."""
        if not self._open:
            return
        try:
            action()
        except (OSError, ValueError, TypeError, OverflowError, EOFError, RecursionError):
            self.close()

    def _close_if_silent(self) -> None:
        if self._terminal is None:
            self.close()


def peer_uid(sock: socket.socket) -> int:
    """User id of the process that connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid: int = struct.unpack("iII", credentials)[1]
    return uid


def checked_size(rows: int, columns: int) -> tuple[int, int]:
    """The size of a terminal, if it is one. Raises ValueError."""
    if not (0 <= rows <= 0xFFFF and 0 <= columns <= 0xFFFF):
        raise ValueError("Not the size of a terminal.")
    return rows, columns
