"""Threads that wait in the kernel when their session is hibernated: they go on waiting when it comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.installation import eventually
from tests.sessions.stage import Stage, a_stage

from torpor.engine import interrupted, procfs
from torpor.engine.protobuf import entry, packed
from torpor.model import OperationKind, Session

WAITER = """
import ctypes, os, signal, threading, time
libc = ctypes.CDLL(None, use_errno=True)
at, never = ctypes.addressof, 10**6
events, word = ctypes.create_string_buffer(100), ctypes.c_int(5)
later = (ctypes.c_long * 2)(int(time.monotonic()) + never, 0)
epoll = libc.epoll_create1(0)
ready, writing = os.pipe()
descriptor = (ctypes.c_int * 2)(ready, 1)
WITHOUT_LIMIT = {
    "poll": (7, at(descriptor), 1, -1),
    "epoll_wait": (232, epoll, at(events), 1, -1),
    "epoll_pwait": (281, epoll, at(events), 1, -1, 0, 8),
    "epoll_pwait2": (441, epoll, at(events), 1, 0, 0, 8),
    "futex until": (202, at(word), 9, 5, at(later), 0, 0xFFFFFFFF),
    "futex": (202, at(word), 0, 5, 0),
    "pause": (34,),
}
def wait(name, call):
    result = libc.syscall(*map(ctypes.c_long, call))
    print(name, result, ctypes.get_errno(), flush=True)
threads = [threading.Thread(target=wait, args=one, daemon=True) for one in WITHOUT_LIMIT.items()]
threads.append(threading.Thread(target=wait, args=("limited poll", (7, 0, 0, never * 1000)), daemon=True))
for thread in threads:
    thread.start()
signal.signal(signal.SIGUSR1, lambda *_: os.write(writing, b"x"))
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def stage() -> Iterator[Stage]:
    yield from a_stage()


def waiting(stage: Stage, session: Session) -> int:
    """How many threads of its command sleep in a call."""
    init = stage.session(session).init
    assert init is not None
    command = procfs.tree(init.pid)[1]
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{command}/task").glob("*/stat")]
    return states.count("S")


def test_who_waits_without_a_limit_waits_on(stage: Stage) -> None:
    """A call with a time limit fails as interrupted, which the program is told; no other call is seen to end."""
    session = stage.start(WAITER)
    stage.wait_for_output(session, lambda lines: "up" in lines)
    for expected in (9, 8):  # the main thread with them; one ends at once
        eventually(lambda: waiting(stage, session), expected.__eq__)
        stage.run(stage.session(session), OperationKind.HIBERNATE)
        stage.run(stage.session(session), OperationKind.RESUME)
    stage.wait_for_output(session, lambda lines: "limited poll -1 4" in lines)
    init = stage.session(session).init
    assert init is not None
    os.kill(procfs.tree(init.pid)[1], signal.SIGUSR1)
    lines = stage.wait_for_output(session, lambda lines: "poll 1 0" in lines)
    assert sorted(lines) == ["limited poll -1 4", "poll 1 0", "up"]


SIGNAL = packed([(1, b"a signal")])


def core(result: int, *, call: int = 7, limit: int = 0xFFFFFFFF, own: bytes = b"", shared: bytes = b"") -> bytes:
    """An image of a thread that was in poll, or in another call."""
    registers = dict.fromkeys(range(1, 28), 0) | {11: result, 13: limit, 16: call, 17: 1000, 18: 0x33}
    machine = packed([(1, 0), (2, packed(registers.items()))])
    return b"headings" + entry(packed([(1, 1), (2, machine), (3, packed([(10, shared)])), (5, packed([(9, own)]))]))


def test_only_what_was_interrupted_by_the_freeze_is_made_again() -> None:
    again = interrupted.made_again(core(interrupted.INTERRUPTED))
    assert again == core(7).replace(packed([(17, 1000)]), packed([(17, 998)]))
    for unchanged in (
        core(1),
        core(interrupted.INTERRUPTED, limit=1000),
        core(interrupted.INTERRUPTED, call=35),
        core(interrupted.INTERRUPTED, own=SIGNAL),
        core(interrupted.INTERRUPTED, shared=SIGNAL),
    ):
        assert interrupted.made_again(unchanged) == unchanged
