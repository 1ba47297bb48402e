"""The sensors, on real trees and terminals where there is something real to read."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.idle import cpu
from torpor.idle.facts import CpuSample
from torpor.idle.sensors import CpuMeter, terminal_use
from torpor.model import ProcessId

INIT = ProcessId(4242, 1, "boot")


class Machine:
    """A clock and a tree whose CPU time a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: float | None = 0.0

    def meter(self, **options: float) -> CpuMeter:
        read: Callable[[ProcessId], float | None] = lambda _init: self.seconds  # noqa: E731
        return CpuMeter(read, clock=lambda: self.now, **options)


def test_samples_of_another_init_are_dropped() -> None:
    machine = Machine()
    meter = machine.meter()
    meter.sample("s", INIT)
    machine.now = 10.0
    assert len(meter.sample("s", INIT)) == 2
    assert len(meter.sample("s", ProcessId(4242, 2, "boot"))) == 1
    meter.forget("s")
    assert len(meter.sample("s", INIT)) == 1


def test_a_reading_that_fails_adds_nothing() -> None:
    machine = Machine()
    meter = machine.meter()
    assert len(meter.sample("s", INIT)) == 1
    machine.seconds = None
    assert len(meter.sample("s", INIT)) == 1


@settings(deadline=None, max_examples=20)
@given(st.floats(1.0, 15.0), st.floats(0.0, 0.009))
def test_hours_of_samples_stay_few_and_still_show_a_quiet_tree_as_quiet(period: float, load: float) -> None:
    machine = Machine()
    meter = machine.meter(window=60.0, horizon=1200.0)
    kept: tuple[CpuSample, ...] = ()
    while machine.now < 2400.0:
        machine.now += period
        machine.seconds = load * machine.now
        kept = meter.sample("s", INIT)
    assert len(kept) <= 1200 / 15 + 120 / period + 3
    assert cpu.last_use(kept, 0.02, 60.0) == kept[0].at
    assert kept[0].at <= machine.now - 1100


def test_samples_reach_back_as_far_as_a_long_limit_needs() -> None:
    machine = Machine()
    meter = machine.meter(window=60.0, horizon=600.0)
    for minute in range(200):
        machine.now = 60.0 * minute
        meter.sample("s", INIT, idle_after=7200.0)
    kept = meter.sample("s", INIT, idle_after=7200.0)
    assert kept[-1].at - kept[0].at >= 7200.0


def test_a_terminal_that_is_printed_to_was_used_and_one_that_is_gone_is_unknown() -> None:
    ours, theirs = pty.openpty()
    path = os.ttyname(theirs)
    os.utime(path, (1.0, 1.0))
    used = terminal_use(path)
    assert used is not None
    assert used.last_use == pytest.approx(1.0)
    os.close(theirs)
    os.close(ours)
    assert terminal_use(path) is None
