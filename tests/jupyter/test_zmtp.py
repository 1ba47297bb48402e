"""ZeroMQ's wire protocol, against libzmq itself and in pieces of any size."""

from __future__ import annotations

import socket
from itertools import pairwise
from pathlib import Path

import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torpor.jupyter.zmtp import GREETING, LARGE, Peer

_PROPERTIES = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
READY = bytes((4, len(_PROPERTIES))) + _PROPERTIES
messages = st.lists(st.lists(st.binary(max_size=400), min_size=1, max_size=4), max_size=5)


def wire(said: list[list[bytes]]) -> bytes:
    """These messages as a peer sends them."""
    sender = Peer("DEALER", joins_at=0)
    for message in said:
        sender.send(message)
    return b"".join(sender.take())


def heard(peer: Peer, data: bytes, cuts: list[int]) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, stop in pairwise(bounds):
        found += [[frame.bytes for frame in frames] for frames in peer.feed(data[start:stop])]
    return found


@given(messages, st.lists(st.integers(0, 10_000), max_size=12))
def test_messages_arrive_whole_whatever_the_pieces(said: list[list[bytes]], cuts: list[int]) -> None:
    peer = Peer("DEALER", b"me")
    data = GREETING + READY + wire(said)
    assert heard(peer, data, cuts) == said
    assert peer.is_ready
    assert peer.whole == len(data)


@given(messages, st.data())
def test_a_peer_joins_after_any_whole_message(said: list[list[bytes]], data: st.DataObject) -> None:
    first = Peer("DEALER", joins_at=0)
    stop = data.draw(st.integers(0, len(wire(said))))
    before = heard(first, wire(said)[:stop], [])
    second = Peer("DEALER", joins_at=first.whole)
    assert before + heard(second, wire(said)[first.whole :], []) == said
    assert second.whole == len(wire(said))


@settings(deadline=None, max_examples=10)
@given(st.integers(LARGE, 3 * LARGE), st.lists(st.integers(0, 3 * LARGE), max_size=5))
def test_large_frames_arrive_whole(size: int, cuts: list[int]) -> None:
    said = [[b"head", bytes(range(256)) * (size // 256), b"tail"], [b"next"]]
    assert heard(Peer("DEALER", joins_at=0), wire(said), cuts) == said


@example(b"\x04\x00")  # a command without a name
@given(st.binary(max_size=300))
def test_nonsense_raises_nothing(noise: bytes) -> None:
    for _ in Peer("SUB", subscribe=True).feed(GREETING + noise):
        pass


def test_what_is_said_before_the_other_end_is_ready_comes_after_the_handshake() -> None:
    peer = Peer("DEALER", b"me")
    peer.send([b"early"])
    assert b"early" not in b"".join(peer.take())
    assert heard(peer, GREETING + READY, []) == []
    assert b"early" in b"".join(peer.take())


def test_a_ping_is_answered() -> None:
    peer = Peer("DEALER", joins_at=0)
    assert heard(peer, b"\x04\x09\x04PING\x00\x0ahi", []) == []
    assert peer.take() == [b"\x04\x07\x04PONGhi"]


def test_libzmq_understands_it(tmp_path: Path) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    publisher = context.socket(zmq.XPUB)
    try:
        for name, bound in (("router", router), ("publisher", publisher)):
            bound.bind(f"ipc://{tmp_path}/{name}")
        dealer, dealer_socket = Peer("DEALER", b"me"), reach(tmp_path / "router")
        subscriber, subscriber_socket = Peer("SUB", subscribe=True), reach(tmp_path / "publisher")
        dealer.send([b"question", b"x" * 100_000])
        converse(dealer, dealer_socket, until=1)
        assert router.recv_multipart() == [b"me", b"question", b"x" * 100_000]
        router.send_multipart([b"me", b"answer", b"y" * 1_000_000])
        assert converse(dealer, dealer_socket, until=2) == [[b"answer", b"y" * 1_000_000]]
        converse(subscriber, subscriber_socket, until=1)
        assert publisher.recv() == b"\x01"
        publisher.send_multipart([b"topic", b"news"])
        assert converse(subscriber, subscriber_socket, until=2) == [[b"topic", b"news"]]
        dealer_socket.close()
        subscriber_socket.close()
    finally:
        context.destroy(linger=0)


def reach(path: Path) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(60)
    connected.connect(str(path))
    return connected


def converse(peer: Peer, connection: socket.socket, *, until: int) -> list[list[bytes]]:
    """Passes bytes on: `until` 1 it is ready and has said all; 2: until a message comes."""
    found: list[list[bytes]] = []
    while True:
        for blob in peer.take():
            connection.sendall(blob)
        if (until == 1 and peer.is_ready) or found:
            return found
        found += [[frame.bytes for frame in frames] for frames in peer.feed(connection.recv(1 << 16))]
