"""The relay's way to a kernel that has an inner half: connections to its sockets that outlive hibernations."""

from __future__ import annotations

import errno
import os
import select
import socket
import uuid
from collections.abc import Sequence

import zmq

from torpor.jupyter.connection import InnerHalf
from torpor.jupyter.inner import CHANNELS
from torpor.jupyter.line import ANSWER, AT_MOST, HELLO, MAC, NONCE, STREAM, VERDICT, Line, is_proof, proof
from torpor.jupyter.zmtp import Peer

Received = list[tuple[str, list[zmq.Frame]]]


class InnerSide:
    """One stream of messages to and from a kernel, over one connection to its inner half after the other.

    `is_connected` tells whether there is one; `connect` tries once. `is_lost` becomes true when the inner half is not
    where this stream is (its session came back from an older checkpoint): then a new stream has to begin.
    """

    lossless = True

    def __init__(self, inner: InnerHalf) -> None:
        identity = uuid.uuid4().hex.encode()
        self.is_lost = False
        self._inner = inner
        self._stream = os.urandom(STREAM)
        self._is_new = True
        self._line = Line()
        self._peers = {
            channel: Peer("SUB", subscribe=True) if channel == "iopub" else Peer("DEALER", identity)
            for channel in CHANNELS
        }
        self._poll = select.epoll()
        self._attempt: socket.socket | None = None
        self._read = b""
        self._nonce = b""
        for channel in CHANNELS:
            self._hand_over(channel)

    @property
    def sources(self) -> list[int]:
        """What to poll: readable when `collect` has something to do."""
        return [self._poll.fileno()]

    @property
    def is_connected(self) -> bool:
        """Whether messages get through now."""
        return self._line.connection is not None

    @property
    def stdin_is_connected(self) -> bool:
        """Whether the kernel can ask for input."""
        return self._peers["stdin"].is_ready

    def connect(self) -> None:
        """Starts an attempt to connect, unless there is a connection or an attempt; `collect` sees it through."""
        if self._attempt is not None or self.is_connected or self.is_lost:
            return
        attempt = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        attempt.setblocking(False)
        attempt.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if attempt.connect_ex((self._inner.ip, self._inner.port)) not in (0, errno.EINPROGRESS):
            attempt.close()
            return
        self._attempt, self._read, self._nonce = attempt, b"", b""
        self._poll.register(attempt, select.EPOLLIN)

    def disconnect(self) -> None:
        """Leaves the inner half; the stream goes on with the next connection."""
        for connection in (self._attempt, self._line.connection):
            if connection is not None:
                self._poll.unregister(connection)
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._line.detach()

    def collect(self, _source: object) -> Received:
        """The messages that have come, each with its channel."""
        received: Received = []
        try:
            if self._attempt is not None:
                self._shake_hands(self._attempt)
            elif self.is_connected:
                for number, data in self._line.receive():
                    channel = CHANNELS[number]
                    received += [(channel, frames) for frames in self._peers[channel].feed(data)]
                    self._hand_over(channel)
            self._flush()
        except OSError:
            self.disconnect()
        return received

    def send(self, channel: str, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Sends a message, now or as soon as there is a connection."""
        self._peers[channel].send(frames)
        self._hand_over(channel)
        try:
            self._flush()
        except OSError:
            self.disconnect()

    def close(self) -> None:
        """Ends the stream."""
        self.disconnect()
        self._poll.close()

    def _hand_over(self, channel: str) -> None:
        number = CHANNELS.index(channel)
        for blob in self._peers[channel].take():
            for start in range(0, len(blob), AT_MOST):
                self._line.add(number, blob[start : start + AT_MOST])

    def _flush(self) -> None:
        if self._line.connection is not None:
            self._line.flush()
            waits = select.EPOLLOUT if self._line.is_stuck else 0
            self._poll.modify(self._line.connection, select.EPOLLIN | waits)

    def _shake_hands(self, attempt: socket.socket) -> None:
        wanted = VERDICT.size if self._nonce else len(HELLO) + NONCE
        try:
            piece = attempt.recv(wanted - len(self._read))
        except BlockingIOError:
            return
        if not piece:
            raise ConnectionResetError
        self._read += piece
        if len(self._read) < wanted:
            return
        said, self._read = self._read, b""
        if not self._nonce:
            self._answer(attempt, said)
        else:
            self._conclude(attempt, said)

    def _answer(self, attempt: socket.socket, hello: bytes) -> None:
        if not hello.startswith(HELLO):
            raise ConnectionAbortedError
        self._nonce = os.urandom(NONCE)
        said = ANSWER.pack(self._nonce, self._stream, self._is_new, self._line.heard, b"")[:-MAC]
        attempt.send(said + proof(self._inner.secret, b"relay", hello[len(HELLO) :], said))

    def _conclude(self, attempt: socket.socket, verdict: bytes) -> None:
        goes_on, heard, shown = VERDICT.unpack(verdict)
        if not is_proof(shown, self._inner.secret, b"inner", self._nonce, verdict[:-MAC]):
            raise ConnectionAbortedError
        if not goes_on or not self._line.can_go_on(heard):
            self.is_lost = True
            raise ConnectionAbortedError
        self._attempt = None
        self._is_new = False
        self._line.attach(attempt, heard)
