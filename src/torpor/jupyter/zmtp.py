"""ZeroMQ's wire protocol (ZMTP 3.0, no encryption) without a socket: for a connection that outlives its sockets.

A connection that libzmq makes ends when its socket does. This one is bytes that go in and come out, so that the
kernel's end of it may sleep in a checkpoint and go on later as if nothing had been.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence

import zmq

MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
GREETING_SIZE = len(GREETING)
SHORTEST_LONG = 256  # bytes of the shortest frame whose length needs eight bytes
LARGE = 64 << 10  # bytes from which a frame gets memory of its own before all of it is here
_LENGTH = struct.Struct(">Q")
log = logging.getLogger(__name__)


class Peer:
    """The connecting end of one ZMTP connection. `leaving` is what it has to send.

    A peer that takes the place of one that is gone begins at byte `joins_at`, the end of a whole message.
    """

    def __init__(
        self, socket_type: str, identity: bytes = b"", *, subscribe: bool = False, joins_at: int | None = None
    ) -> None:
        is_new = joins_at is None
        self.is_ready = not is_new  # the other end has told who it is
        self.whole = joins_at or 0  # bytes up to the end of the last whole message
        self.leaving: list[bytes] = [GREETING, _ready(socket_type.encode(), identity)] if is_new else []
        self._later: list[bytes] = [_framed(0, b"\x01")] if subscribe and is_new else []
        self._is_greeted = not is_new
        self._heard = self.whole  # bytes before those in `_rest`
        self._rest = b""
        self._message: list[zmq.Frame] = []
        self._large: bytearray | None = None  # what has come of a frame that is large
        self._large_flags = 0
        self._large_size = 0

    def send(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Adds one message to `leaving`, or keeps it until the other end is ready."""
        last = len(frames) - 1
        blob = b"".join(
            part for number, frame in enumerate(frames) for part in _parts(MORE if number < last else 0, frame)
        )
        (self.leaving if self.is_ready else self._later).append(blob)

    def take(self) -> list[bytes]:
        """What has to be sent now; it is forgotten here."""
        leaving, self.leaving = self.leaving, []
        return leaving

    def feed(self, data: bytes) -> Iterator[list[zmq.Frame]]:
        """The messages that are complete with these bytes. `whole` follows; all of them have to be taken."""
        if self._rest:
            data = self._rest + data
        start = 0
        if not self._is_greeted:
            if len(data) < GREETING_SIZE:
                self._rest = data
                return
            self._greet(data)
            start = GREETING_SIZE
        while True:
            flags, body, stop = self._next_frame(data, start)
            start = stop
            if body is None:
                break
            if flags & COMMAND:
                self._on_command(bytes(body))
            else:
                self._message.append(zmq.Frame(body))
            if flags & MORE or (flags & COMMAND and self._message):
                continue
            self.whole = self._heard + start
            if self._message:
                message, self._message = self._message, []
                yield message
        self._rest = data[start:]
        self._heard += start

    def _next_frame(self, data: bytes, start: int) -> tuple[int, bytes | bytearray | None, int]:
        """Flags and body of the next frame, and where the one after it begins; no body when it is not all here."""
        if self._large is None:
            flags, size, at = _header(data, start)
            if at < 0 or (at + size > len(data) and size < LARGE):
                return 0, None, start
            if at + size <= len(data):
                return flags, data[at : at + size], at + size
            self._large, self._large_flags, self._large_size, start = bytearray(), flags, size, at
        stop = start + self._large_size - len(self._large)
        self._large += memoryview(data)[start:stop]
        start = min(stop, len(data))
        if len(self._large) < self._large_size:
            return 0, None, start
        body, self._large = self._large, None
        return self._large_flags, body, start

    def _greet(self, data: bytes) -> None:
        self._is_greeted = True
        if data[:1] != b"\xff" or data[10] < 3 or data[12:17] != b"NULL\0":
            log.warning("This kernel does not speak ZMTP 3 without encryption: it will not be understood.")

    def _on_command(self, body: bytes) -> None:
        end = 1 + int.from_bytes(body[:1], "big")
        name, rest = body[1:end], body[end:]
        if name == b"READY":
            self.is_ready = True
            self.leaving += self._later
            self._later = []
        elif name == b"PING":
            self.leaving.append(_framed(COMMAND, b"\x04PONG" + rest[2:]))
        elif name == b"ERROR":
            log.warning("The kernel refused a connection: %s", rest[1:].decode(errors="replace"))


def _header(data: bytes, start: int) -> tuple[int, int, int]:
    """Flags, size and position of a frame's body; the position is -1 when its header is not complete."""
    if len(data) < start + 2:
        return 0, 0, -1
    flags = data[start]
    if not flags & LONG:
        return flags, data[start + 1], start + 2
    if len(data) < start + 9:
        return 0, 0, -1
    return flags, _LENGTH.unpack_from(data, start + 1)[0], start + 9


def _parts(flags: int, frame: bytes | zmq.Frame) -> tuple[bytes, bytes | memoryview]:
    body = frame.buffer if isinstance(frame, zmq.Frame) else frame
    size = len(body)
    if size < SHORTEST_LONG:
        return bytes((flags, size)), body
    return bytes((flags | LONG,)) + _LENGTH.pack(size), body


def _framed(flags: int, body: bytes) -> bytes:
    return b"".join(_parts(flags, body))


def _ready(socket_type: bytes, identity: bytes) -> bytes:
    properties = ((b"Socket-Type", socket_type), (b"Identity", identity))
    body = b"".join(bytes((len(name),)) + name + struct.pack(">I", len(value)) + value for name, value in properties)
    return _framed(COMMAND, b"\x05READY" + body)
