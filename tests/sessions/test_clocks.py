"""Clocks of a session that was away: its monotonic ones go on where they were, and timers keep their meaning."""

from __future__ import annotations

from tests.sessions.altered import alter_image
from tests.sessions.stage import Stage

from torpor.engine.protobuf import entries_of, entry, fields_of, packed
from torpor.model import OperationKind

CLOCKS = """
import ctypes, os, struct, threading, time
libc = ctypes.CDLL(None)
timer = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 0, 10_000, 0), None)
slept = threading.Event()
def sleep():
    before = time.monotonic()
    time.sleep(9_000)
    slept.set()
threading.Thread(target=sleep, daemon=True).start()
last = (0.0, 0.0)
while True:
    now = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    left = ctypes.create_string_buffer(32)
    libc.timerfd_gettime(timer, left)
    seconds = struct.unpack("qqqq", left.raw)[2]
    print(now >= last, now[0], now[1], 10_000 - seconds, slept.is_set(), flush=True)
    last = now
    time.sleep(0.05)
"""
HOURS = 3 * 3600


def later(timens: bytes) -> bytes:
    """The clocks as they would be if the session had been saved hours later: on a node that has been up for longer."""
    (body,) = entries_of(timens)
    clocks = []
    for number, clock in fields_of(body):
        assert isinstance(clock, bytes)
        (_, seconds), *rest = fields_of(clock)
        assert isinstance(seconds, int)
        clocks.append((number, packed([(1, seconds + HOURS), *rest])))
    return timens[:8] + entry(packed(clocks))


def test_monotonic_clocks_never_go_back(stage: Stage) -> None:
    session = stage.start(CLOCKS)
    stage.wait_for_output(session, lambda lines: len(lines) >= 2)
    for _ in range(3):
        stage.run(stage.session(session), OperationKind.HIBERNATE)
        here = len(stage.output(session))
        stage.run(stage.session(session), OperationKind.RESUME)
        lines = [line.split() for line in stage.wait_for_output(session, lambda lines: len(lines) >= here + 3)]  # noqa: B023
        assert {line[0] for line in lines} == {"True"}
        # What passed while it was away did not pass for it: neither for its clocks nor for its timers and sleeps.
        before, after = lines[here - 1], lines[here]
        assert float(after[1]) - float(before[1]) < 60
        assert float(after[2]) - float(before[2]) < 60
        assert int(after[3]) - int(before[3]) < 60
        assert after[4] == "False"


def test_a_node_that_was_started_later_does_not_turn_clocks_back(stage: Stage) -> None:
    session = stage.start(CLOCKS)
    stage.wait_for_output(session, lambda lines: len(lines) >= 2)
    stage.run(session, OperationKind.HIBERNATE)
    alter_image(stage.paths, session.id, "timens-0.img", later)
    for _ in range(2):
        here = len(stage.output(session))
        stage.run(stage.session(session), OperationKind.RESUME)
        lines = [line.split() for line in stage.wait_for_output(session, lambda lines: len(lines) >= here + 3)]  # noqa: B023
        assert {line[0] for line in lines} == {"True"}
        assert float(lines[-1][1]) - float(lines[0][1]) > HOURS
        stage.run(stage.session(session), OperationKind.HIBERNATE)
