"""The relay's way to a kernel that has an inner half: connections to its sockets that outlive hibernations."""

from __future__ import annotations

import errno
import os
import select
import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

from torpor.jupyter.bookmark import Bookmark, Mark
from torpor.jupyter.connection import InnerHalf
from torpor.jupyter.inner import CHANNELS
from torpor.jupyter.line import ANSWER, AT_MOST, HELLO, MAC, NONCE, STREAM, VERDICT, Line, is_proof, proof
from torpor.jupyter.zmtp import Peer

HELD_BACK = 32 << 20  # bytes that the inner half keeps of a message that is not whole yet, in case the relay is killed
_NOTHING = (0,) * len(CHANNELS)  # bytes of each channel

Received = Iterator[tuple[str, list[zmq.Frame]]]


class InnerSide:
    """One stream of messages to and from a kernel, over one connection to its inner half after the other.

    `is_connected` tells whether there is one; `connect` tries once. `is_lost` becomes true when the inner half is not
    where this stream is (its session came back from an older checkpoint): then a new stream has to begin.
    With `goes_on_from` it takes the place of a relay that was killed. `bookmark` keeps its own place for the next one.
    """

    lossless = True

    def __init__(
        self, inner: InnerHalf, bookmark: Bookmark, count: Callable[[], int], goes_on_from: Mark | None
    ) -> None:
        self.is_lost = False
        self.may_repeat = goes_on_from is not None and goes_on_from.in_hand  # the next message may have come before
        self._inner = inner
        self._bookmark = bookmark
        self._count_subscribers = count
        self._predecessor = goes_on_from
        self._stream = goes_on_from.stream if goes_on_from else os.urandom(STREAM)
        self._is_new = goes_on_from is None
        self._line = Line(settles_later=True)
        self._peers = _peers(goes_on_from.read if goes_on_from else None)
        self._known = list(goes_on_from.read if goes_on_from else _NOTHING)  # bytes that a predecessor has passed on
        self._passed_on = list(self._known)  # bytes of each channel up to the last message that was passed on
        self._settled = list(_NOTHING)  # bytes of each channel in frames that need not come again
        self._unsettled: deque[tuple[int, int]] = deque()  # frames that may have to: channel, bytes
        self._unsettled_bytes = 0
        self._large = (0, 0)
        if goes_on_from:
            self._line.inherit(goes_on_from.settled)
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
        """The messages that have come, each with its channel. Whoever asks for the next one has passed on the last."""
        try:
            if self._attempt is not None:
                self._shake_hands(self._attempt)
            elif self.is_connected:
                for number, data in self._line.receive():
                    yield from self._take(number, data)
                self._settle()
            self._flush()
        except OSError:
            self.disconnect()

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

    def _take(self, number: int, data: bytes) -> Received:
        channel = CHANNELS[number]
        peer = self._peers[channel]
        self._unsettled.append((number, len(data)))
        self._unsettled_bytes += len(data)
        skipped = min(self._known[number], len(data))
        self._known[number] -= skipped
        for frames in peer.feed(data[skipped:]):
            self._bookmark.begin()
            yield channel, frames
            self.may_repeat = False
            self._passed_on[number] = peer.whole
            self._set_bookmark()
        self._passed_on[number] = peer.whole
        self._hand_over(channel)

    def _settle(self) -> None:
        """What clients have got, and all that is too much to be kept twice, need not come again."""
        frames = self._line.settled
        while self._unsettled:
            number, size = self._unsettled[0]
            is_read = self._passed_on[number] >= self._settled[number] + size
            if not is_read and self._unsettled_bytes <= HELD_BACK and not self._line.is_asked:
                break
            self._unsettled.popleft()
            self._unsettled_bytes -= size
            self._settled[number] += size
            frames += 1
        self._line.settled = frames
        self._set_bookmark()
        self._line.settle(frames)

    def _set_bookmark(self) -> None:
        read = tuple(map(int.__sub__, self._passed_on, self._settled))
        is_ready = all(peer.is_ready for peer in self._peers.values())
        is_whole = is_ready and min(read) >= 0
        read = read if is_whole else _NOTHING
        subscribers = self._count_subscribers()
        self._bookmark.set(Mark(self._stream, is_whole, self._line.settled, read, self._large, subscribers))

    def _hand_over(self, channel: str) -> None:
        number = CHANNELS.index(channel)
        for blob in self._peers[channel].take():
            if len(blob) > AT_MOST:
                first = self._large[0] if self._large[1] > self._line.confirmed else self._line.count
                self._large = (first, self._line.count + -(-len(blob) // AT_MOST))
                self._set_bookmark()
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
        said = ANSWER.pack(self._nonce, self._stream, self._is_new, self._line.settled, self._line.heard, b"")[:-MAC]
        attempt.send(said + proof(self._inner.secret, b"relay", hello[len(HELLO) :], said))

    def _conclude(self, attempt: socket.socket, verdict: bytes) -> None:
        goes_on, heard, shown = VERDICT.unpack(verdict)
        if not is_proof(shown, self._inner.secret, b"inner", self._nonce, verdict[:-MAC]):
            raise ConnectionAbortedError
        if goes_on and self._predecessor:
            goes_on = not self._predecessor.large[0] < heard < self._predecessor.large[1]
            self._line.start_at(heard)
        if not goes_on or not self._line.can_go_on(heard, heard):
            self.is_lost = True
            raise ConnectionAbortedError
        self._attempt = None
        self._is_new = False
        self._predecessor = None
        self._line.attach(attempt, heard, heard)


def _peers(joined_at: tuple[int, ...] | None) -> dict[str, Peer]:
    identity = uuid.uuid4().hex.encode()
    peers = {}
    for number, channel in enumerate(CHANNELS):
        joins_at = joined_at[number] if joined_at else None
        if channel == "iopub":
            peers[channel] = Peer("SUB", subscribe=True, joins_at=joins_at)
        else:
            peers[channel] = Peer("DEALER", identity, joins_at=joins_at)
    return peers
