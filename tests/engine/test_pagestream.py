"""The page stream by itself: a sender that speaks CRIU's protocol, and a store that only takes notes."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from torpor.engine.pagestream import (
    ADD_F,
    CLOSE,
    FLAG_PRESENT,
    MESSAGE,
    PAGE,
    SEGMENT,
    TYPE_TASK,
    PageReceiver,
    SegmentPool,
)
from torpor.errors import EngineError, StoreError

PID = 7
START = 1 << 40


def sent(connection: socket.socket, memory: bytes) -> threading.Thread:
    """Sends one run of pages, and waits for the answer to its end, as CRIU does while the tree is frozen."""

    def send() -> None:
        pages = len(memory) // PAGE
        connection.sendall(MESSAGE.pack(ADD_F | FLAG_PRESENT << 16, pages, START, PID << 8 | TYPE_TASK))
        connection.sendall(memory)
        connection.sendall(MESSAGE.pack(CLOSE, 0, 0, 0))
        assert connection.recv(4) == bytes(4)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


@pytest.mark.parametrize("store_later", [False, True])
@pytest.mark.parametrize("buffers", [2, 16])
def test_memory_arrives_in_order_also_when_it_is_larger_than_the_buffers(store_later: bool, buffers: int) -> None:
    memory = os.urandom(5 * SEGMENT + 3 * PAGE)
    chunks: dict[bytes, bytes] = {}

    def put(segment: memoryview, cuts: list[int], /) -> list[bytes]:
        ids = [os.urandom(8) for _ in cuts]
        for chunk_id, start, end in zip(ids, [0, *cuts], cuts, strict=False):
            chunks[chunk_id] = bytes(segment[start:end])
        return ids

    ours, theirs = socket.socketpair()
    with ours, theirs:
        pool = SegmentPool(buffers * SEGMENT, touched=3 * SEGMENT)
        receiver = PageReceiver(ours, put, lambda _: [(START, START + len(memory))], pool, store_later=store_later)
        sender = sent(theirs, memory)
        receiver.receive()
        if store_later and buffers == 16:
            assert not chunks
        (found,) = receiver.finish()
        sender.join()
    assert (found.image_id, found.bytes_present) == (PID, len(memory))
    assert b"".join(chunks[chunk_id] for chunk_id in found.ids) == memory


@pytest.mark.parametrize("store_later", [False, True])
def test_a_store_that_fails_is_told_to_whoever_waits(store_later: bool) -> None:
    def put(segment: memoryview, cuts: list[int], /) -> list[bytes]:
        raise StoreError(f"no room for {len(segment)} bytes in {len(cuts)} chunks")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        receiver = PageReceiver(ours, put, lambda _: [], SegmentPool(16 * SEGMENT), store_later=store_later)
        sender = sent(theirs, bytes(PAGE))
        receiver.receive()
        with pytest.raises(StoreError, match="no room"):
            receiver.finish()
        sender.join()


def test_a_sender_that_hangs_up_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        receiver = PageReceiver(ours, lambda _, cuts: [b""] * len(cuts), lambda _: [], SegmentPool(2 * SEGMENT))
        theirs.close()
        with pytest.raises(EngineError, match="before its end"):
            receiver.receive()
