"""The verdict on sessions as they occur."""

from __future__ import annotations

import msgspec

from torpor.idle.facts import CpuSample, Facts, TerminalUse
from torpor.idle.policy import Policy
from torpor.idle.verdict import due, judge
from torpor.model import Kernel

NOW = 1_000_000.0
HOUR = 3600.0
QUIET = tuple(CpuSample(NOW - 2 * HOUR + 10 * i, 5.0 + 0.02 * i) for i in range(721))
NOTEBOOK = Facts(
    now=NOW,
    started=NOW - 5 * HOUR,
    kind="kernel",
    kernel=Kernel(execution_state="idle", since=NOW - HOUR, last_message=NOW - HOUR, heard=NOW - 5),
    cpu=QUIET,
)


def changed(facts: Facts, **changes: object) -> Facts:
    return msgspec.structs.replace(facts, **changes)


def kernel(**changes: object) -> Facts:
    assert NOTEBOOK.kernel is not None
    return changed(NOTEBOOK, kernel=msgspec.structs.replace(NOTEBOOK.kernel, **changes))


def burst_at(age: float, seconds: float) -> tuple[CpuSample, ...]:
    return tuple(CpuSample(s.at, s.seconds + (seconds if s.at >= NOW - age else 0.0)) for s in QUIET)


def test_an_idle_notebook_counts_from_its_last_use_and_is_due_after_half_an_hour() -> None:
    verdict = judge(NOTEBOOK, Policy())
    assert (verdict.verdict, verdict.since) == ("idle", NOW - HOUR)
    assert verdict.sentence.startswith("Idle for 1 h: its kernel was last used 1 h ago")
    assert due(verdict, Policy(), NOTEBOOK) == "hibernate"


def test_before_its_limit_it_is_told_how_long_it_has() -> None:
    facts = changed(NOTEBOOK, idle_after=1.5 * HOUR)
    verdict = judge(facts, Policy())
    assert due(verdict, Policy(), facts) is None
    assert "hibernated in 30 min" in verdict.would_change


def test_a_silent_cell_with_the_tab_closed_is_busy() -> None:
    verdict = judge(kernel(execution_state="busy", since=NOW - 4 * HOUR, last_message=NOW - 4 * HOUR), Policy())
    assert verdict.verdict == "busy"
    assert "running a cell for 4 h" in verdict.sentence


def test_an_open_input_and_a_queued_cell_are_busy() -> None:
    assert judge(kernel(waiting_for_input=True), Policy()).verdict == "busy"
    assert judge(kernel(queued=1), Policy()).verdict == "busy"


def test_a_thread_that_computes_is_busy_though_the_kernel_is_idle() -> None:
    computing = tuple(CpuSample(s.at, s.seconds + 0.05 * (s.at - QUIET[0].at)) for s in QUIET)
    verdict = judge(changed(NOTEBOOK, cpu=computing), Policy())
    assert verdict.verdict == "busy"
    assert "0.052 of a core over the last 1 min" in verdict.sentence


def test_a_burst_in_the_background_restarts_the_count_when_it_ends() -> None:
    assert judge(changed(NOTEBOOK, cpu=burst_at(1200, 30.0)), Policy()).since == NOW - 1200


def test_a_hiccup_below_the_threshold_is_not_a_use() -> None:
    assert judge(changed(NOTEBOOK, cpu=burst_at(1200, 0.5)), Policy()).since == NOW - HOUR


def test_a_short_limit_measures_cpu_over_no_more_than_itself() -> None:
    facts = changed(NOTEBOOK, cpu=burst_at(20, 30.0), idle_after=10.0)
    verdict = judge(facts, Policy())
    assert (verdict.verdict, verdict.since) == ("idle", NOW - 20)
    assert due(verdict, Policy(), facts) == "hibernate"


def test_nothing_counts_from_before_the_cpu_time_was_read() -> None:
    facts = changed(NOTEBOOK, cpu=QUIET[-31:])
    verdict = judge(facts, Policy())
    assert (verdict.verdict, verdict.since) == ("idle", NOW - 300)
    assert due(verdict, Policy(), facts) is None


def test_a_relay_that_fell_silent_or_never_spoke_is_unknown() -> None:
    assert judge(kernel(heard=NOW - 300), Policy()).verdict == "unknown"
    assert judge(changed(NOTEBOOK, kernel=None), Policy()).verdict == "unknown"
    assert judge(kernel(execution_state="starting"), Policy()).verdict == "unknown"


def test_a_clock_that_was_set_back_makes_readings_unknown() -> None:
    assert judge(kernel(heard=NOW + HOUR), Policy()).verdict == "unknown"


def test_a_key_at_the_terminal_restarts_the_count() -> None:
    facts = changed(NOTEBOOK, has_terminal=True, terminal=TerminalUse(last_use=NOW - 100, read=NOW - 1))
    assert judge(facts, Policy()).since == NOW - 100


def test_a_resume_restarts_the_count() -> None:
    assert judge(changed(NOTEBOOK, last_resume=NOW - 50), Policy()).since == NOW - 50


def test_a_refused_attempt_is_not_repeated_at_once() -> None:
    facts = changed(NOTEBOOK, last_refusal=NOW - 60)
    verdict = judge(facts, Policy())
    assert due(verdict, Policy(), facts) is None
    assert "the next is in 9 min" in verdict.would_change
    assert due(verdict, Policy(retry_after=30.0), facts) == "hibernate"


def test_a_command_that_nothing_wakes_can_be_left_alone_by_the_policy_unless_its_owner_says_otherwise() -> None:
    facts = Facts(now=NOW, started=NOW - 5 * HOUR, cpu=QUIET)
    assert due(judge(facts, Policy()), Policy(), facts) == "hibernate"
    policy = Policy(unattended="none")
    verdict = judge(facts, policy)
    assert verdict.verdict == "idle"
    assert due(verdict, policy, facts) is None
    assert "without --idle-after" in verdict.would_change
    assert due(verdict, policy, changed(facts, idle_after=60.0)) == "hibernate"


def test_a_policy_of_none_does_nothing() -> None:
    policy = Policy(action="none", unattended="hibernate")
    verdict = judge(NOTEBOOK, policy)
    assert due(verdict, policy, changed(NOTEBOOK, idle_after=1.0)) is None
    assert due(verdict, policy, Facts(now=NOW, started=NOW - 5 * HOUR, cpu=QUIET)) is None
    assert "does nothing" in verdict.would_change
