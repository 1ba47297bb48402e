"""The conversation between the relay and its inner half: nothing is lost and nothing comes twice."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.jupyter.bookmark import Bookmark, Mark
from torpor.jupyter.line import CONFIRM_EVERY, FRAME, LARGEST, Line, is_proof, proof

payloads = st.lists(st.binary(max_size=300), max_size=8)


def connect(one: Line, two: Line) -> None:
    """Leads both over a fresh connection, as the handshake does."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    for line in (one, two):
        line.detach()
    settled = (one.settled, one.heard), (two.settled, two.heard)
    assert two.can_go_on(*settled[0])
    assert one.can_go_on(*settled[1])
    one.attach(ends[0], *settled[1])
    two.attach(ends[1], *settled[0])


def close(*lines: Line) -> None:
    for line in lines:
        line.detach()


def all_of(line: Line) -> list[bytes]:
    heard: list[bytes] = []
    while frames := line.receive():
        heard += [payload for _, payload in frames]
    return heard


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(payloads, payloads, st.booleans(), st.booleans()), max_size=8))
def test_what_both_say_arrives_once_and_in_order(rounds: list[tuple[list[bytes], list[bytes], bool, bool]]) -> None:
    one, two = Line(), Line()
    heard: dict[int, list[bytes]] = {1: [], 2: []}
    connect(one, two)
    for from_one, from_two, is_heard, breaks in rounds:
        for line, said in ((one, from_one), (two, from_two)):
            for payload in said:
                line.add(1, payload)
            line.flush()
        if is_heard:
            heard[1] += all_of(two)
            heard[2] += all_of(one)
        if breaks:  # what lay in the connection is gone
            connect(one, two)
    connect(one, two)
    for line in (one, two):
        line.flush()
    heard[1] += all_of(two)
    heard[2] += all_of(one)
    close(one, two)
    assert heard[1] == [payload for from_one, *_ in rounds for payload in from_one]
    assert heard[2] == [payload for _, from_two, *_ in rounds for payload in from_two]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=10), st.data())
def test_a_successor_hears_what_was_not_settled_again(said: list[bytes], data: st.DataObject) -> None:
    settled = data.draw(st.integers(0, len(said)))
    inner, killed = Line(), Line(settles_later=True)
    connect(inner, killed)
    for payload in said:
        inner.add(1, payload)
    inner.flush()
    assert all_of(killed) == said
    killed.settle(settled)
    killed.flush()
    inner.receive()
    successor = Line(settles_later=True)
    successor.inherit(settled)
    successor.start_at(0)
    connect(inner, successor)
    inner.flush()
    assert all_of(successor) == said[settled:]
    close(inner, killed, successor)


def test_what_is_confirmed_is_forgotten() -> None:
    one, two = Line(), Line()
    connect(one, two)
    for _ in range(8):
        one.add(1, bytes(CONFIRM_EVERY // 4))
        one.flush()
        all_of(two)
        two.flush()
        one.receive()
    assert one.kept <= CONFIRM_EVERY
    one.add(1, b"last")
    one.ask()
    one.flush()
    all_of(two)
    two.flush()
    one.receive()
    assert (one.kept, one.confirmed) == (0, one.count)
    close(one, two)


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_a_side_that_missed_something_or_heard_more_than_there_was_cannot_go_on(noise: bytes) -> None:
    line = Line()
    line.add(1, noise)
    assert not line.can_go_on(1, 1)
    line.known = 1
    line.confirmed = 1
    assert not line.can_go_on(0, 0)
    assert not line.can_go_on(1, 2)
    assert line.can_go_on(1, 1)


def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    line = Line()
    near, far = socket.socketpair()
    near.setblocking(False)
    line.attach(near, 0, 0)
    far.sendall(FRAME.pack(1, LARGEST + 1))
    with pytest.raises(ConnectionAbortedError):
        line.receive()
    far.close()
    line.detach()


@given(st.binary(min_size=1, max_size=64), st.binary(max_size=40), st.binary(max_size=40))
def test_only_who_knows_the_secret_can_prove_it(secret: bytes, said: bytes, other: bytes) -> None:
    shown = proof(secret, b"relay", said)
    assert is_proof(shown, secret, b"relay", said)
    assert is_proof(shown, secret, b"relay", other) == (said == other)
    assert not is_proof(shown[:-1] + bytes((shown[-1] ^ 1,)), secret, b"relay", said)


def test_a_bookmark_outlives_its_relay(tmp_path: Path) -> None:
    mark = Mark(b"s" * 16, True, 7, (1, 2, 3, 4), (5, 6), 2)
    first = Bookmark(tmp_path / "bookmark")
    assert first.read() is None
    first.set(mark)
    first.set(mark._replace(settled=8))
    second = Bookmark(tmp_path / "bookmark")
    assert second.read() == mark._replace(settled=8)
    second.begin()
    assert first.read() == mark._replace(settled=8, in_hand=True)
    second.set(mark)
    assert first.read() == mark
    second.set(mark._replace(is_whole=False))
    assert first.read() is None
    first.close()
    second.close()
