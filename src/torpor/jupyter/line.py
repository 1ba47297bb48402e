"""A conversation in numbered frames that outlives its connections: between the relay and its inner half.

The session goes away and comes back; each time the connection breaks. Frames are kept until the other side has
confirmed them, and sent again over the next connection, so that nothing is lost and nothing comes twice.

Standard library only, and little of it: this is loaded into every kernel's session and saved with it.
"""

from __future__ import annotations

import socket
import struct
from _blake2 import blake2b  # the module hashlib would load all of OpenSSL into every session
from _operator import _compare_digest
from collections import deque
from collections.abc import Iterator

CONFIRM, ASK = 254, 255  # kinds of frames that are not numbered: what was heard, and the question for it
FRAME = struct.Struct("<BI")  # kind, length of what follows
COUNT = struct.Struct("<Q")
LARGEST = 1 << 20  # bytes of a frame
HELLO = b"TORPOR/1"
NONCE, MAC, STREAM = 16, 32, 16  # bytes
ANSWER = struct.Struct(f"<{NONCE}s{STREAM}s?QQ{MAC}s")  # nonce, stream, whether it is new, frames settled, heard, MAC
VERDICT = struct.Struct(f"<?Q{MAC}s")  # whether it goes on, frames heard, MAC
CONFIRM_EVERY = 256 << 10  # bytes heard
AT_ONCE = 64 << 10  # bytes read at once, and while more comes than that:
AT_MOST = 1 << 20


class Line:
    """One side of a conversation in numbered frames, which outlives the connections that it takes place over.

    Frames stay here until the other side has confirmed them. `attach` gives it a connection, `detach` takes it away.
    What was heard is confirmed once it is settled: at once, or (`settles_later`) when `settle` says so.
    """

    def __init__(self, *, settles_later: bool = False) -> None:
        self.heard = 0  # frames of the other side that came
        self.settled = 0  # frames of the other side that need not come again, even if this process dies now
        self.confirmed = 0  # own frames that the other side has
        self.kept = 0  # bytes of own frames that it may not have
        self.known = 0  # own frames that there were when the connection broke
        self.connection: socket.socket | None = None
        self.is_asked = False  # the other side waits for the word that everything is settled
        self._settles_later = settles_later
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._leaving: deque[memoryview] = deque()
        self._arriving = bytearray()
        self._unconfirmed = 0  # bytes
        self._said = 0  # frames
        self._size = AT_ONCE

    @property
    def count(self) -> int:
        """Own frames so far."""
        return self.confirmed + len(self._sent) + len(self._waiting)

    @property
    def is_stuck(self) -> bool:
        """Whether something could not be sent yet, although there is a connection."""
        return self.connection is not None and bool(self._leaving or self._waiting)

    def add(self, kind: int, payload: bytes) -> None:
        """Puts one frame at the end; `flush` sends it."""
        self._waiting.append(FRAME.pack(kind, len(payload)) + payload)
        self.kept += len(payload)

    def inherit(self, settled: int) -> None:
        """Takes the place of a side that is gone and had settled so many frames."""
        self.heard = self.settled = self._said = settled

    def start_at(self, heard: int) -> None:
        """Numbers its own frames from the one after those that the other side has heard from a predecessor."""
        self.confirmed = self.known = heard

    def can_go_on(self, settled: int, heard: int) -> bool:
        """Whether a side that has heard so many frames heard them from here, and misses none that is gone."""
        return self.confirmed <= settled <= heard <= self.known

    def attach(self, connection: socket.socket, settled: int, heard: int) -> None:
        """Goes on over a fresh connection with a side that has settled and heard so many frames."""
        self._confirm(settled)
        while self.confirmed + len(self._sent) < heard:
            self._sent.append(self._waiting.popleft())
        self.connection = connection

    def detach(self) -> None:
        """The connection is gone. What was not confirmed will be sent again."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self.known = self.count
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._leaving.clear()
        self._arriving = bytearray()
        self.is_asked = False

    def settle(self, frames: int) -> None:
        """So many frames of the other side need not come again. It is told, now or later; `flush` sends it."""
        self.settled = frames
        if self.settled > self._said and (self.is_asked or self._unconfirmed >= CONFIRM_EVERY):
            self._say_what_is_settled()

    def ask(self) -> None:
        """Asks the other side to confirm at once what it settles from now on."""
        self._leaving.append(memoryview(FRAME.pack(ASK, 0)))

    def flush(self) -> None:
        """Sends what the connection takes now. Raises OSError when it is gone."""
        if self.connection is None:
            return
        while self._leaving or self._waiting:
            while self._waiting and len(self._leaving) < 16:
                frame = self._waiting.popleft()
                self._sent.append(frame)
                self._leaving.append(memoryview(frame))
            try:
                written = self.connection.sendmsg(self._leaving)
            except BlockingIOError:
                return
            while written:
                first = self._leaving[0]
                if written < len(first):
                    self._leaving[0] = first[written:]
                    break
                written -= len(first)
                self._leaving.popleft()

    def receive(self) -> list[tuple[int, bytes]]:
        """The whole frames that came: kind and payload. Raises OSError when the connection is gone."""
        assert self.connection is not None
        try:
            piece = self.connection.recv(self._size)
        except BlockingIOError:
            return []
        if not piece:
            raise ConnectionResetError
        self._size = AT_MOST if len(piece) == self._size else AT_ONCE
        if self._arriving:
            self._arriving += piece
            frames = list(self._frames(self._arriving))
        else:
            frames = list(self._frames(piece))
        if not self._settles_later:
            self.settle(self.heard)
        return frames

    def _frames(self, data: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
        start, end = 0, len(data)
        view = memoryview(data)
        while end - start >= FRAME.size:
            kind, length = FRAME.unpack_from(data, start)
            if length > LARGEST:
                raise ConnectionAbortedError
            stop = start + FRAME.size + length
            if stop > end:
                break
            payload = bytes(view[start + FRAME.size : stop])
            start = stop
            if kind == CONFIRM:
                self._confirm(COUNT.unpack(payload)[0])
            elif kind == ASK:
                self.is_asked = True
            else:
                self.heard += 1
                self._unconfirmed += length + FRAME.size
                yield kind, payload
        self._arriving = bytearray(view[start:])

    def _say_what_is_settled(self) -> None:
        self._leaving.append(memoryview(FRAME.pack(CONFIRM, COUNT.size) + COUNT.pack(self.settled)))
        self._unconfirmed, self._said = 0, self.settled

    def _confirm(self, heard: int) -> None:
        while self.confirmed < heard:
            frame = self._sent.popleft() if self._sent else self._waiting.popleft()
            self.kept -= len(frame) - FRAME.size
            self.confirmed += 1


def proof(secret: bytes, *parts: bytes) -> bytes:
    """Shows that whoever says this knows the secret."""
    return blake2b(b"".join(parts), digest_size=MAC, key=secret).digest()


def is_proof(found: bytes, secret: bytes, *parts: bytes) -> bool:
    """Whether this is the proof of these parts."""
    return _compare_digest(found, proof(secret, *parts))
