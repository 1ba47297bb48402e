"""What holds of every verdict: more signs of use, or fewer sensors, never make a session idle, or idle for longer."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.idle.strategies import NOW, ages, facts, kernels, moments, policies, terminals

from torpor.idle.facts import CpuSample, Facts, TerminalUse
from torpor.idle.policy import Policy
from torpor.idle.verdict import due, judge
from torpor.model import Kernel


def less_idle_or_same(changed: Facts, original: Facts, policy: Policy) -> None:
    """`changed` knows of more use, or of less altogether, than `original`."""
    before, after = judge(original, policy), judge(changed, policy)
    if before.verdict != "idle":
        assert after.verdict != "idle", (before, after)
    elif after.verdict == "idle":
        assert after.since >= before.since, (before, after)
    if due(before, policy, original) is None:
        assert due(after, policy, changed) is None


def with_kernel(known: Facts, **changes: object) -> Facts:
    assume(known.kernel is not None)
    assert known.kernel is not None
    return msgspec.structs.replace(known, kernel=msgspec.structs.replace(known.kernel, **changes))


@given(facts, policies)
def test_a_busy_kernel_never_makes_it_idle(known: Facts, policy: Policy) -> None:
    less_idle_or_same(with_kernel(known, execution_state="busy"), known, policy)


@given(facts, policies)
def test_an_open_input_never_makes_it_idle(known: Facts, policy: Policy) -> None:
    less_idle_or_same(with_kernel(known, waiting_for_input=True), known, policy)


@given(facts, policies, st.integers(1, 5))
def test_a_queued_cell_never_makes_it_idle(known: Facts, policy: Policy, more: int) -> None:
    assume(known.kernel is not None)
    assert known.kernel is not None
    less_idle_or_same(with_kernel(known, queued=known.kernel.queued + more), known, policy)


@given(facts, policies, moments)
def test_a_later_message_never_makes_it_idle(known: Facts, policy: Policy, at: float) -> None:
    assume(known.kernel is not None)
    assert known.kernel is not None
    less_idle_or_same(with_kernel(known, last_message=max(at, known.kernel.last_message)), known, policy)


@given(facts, policies, kernels)
def test_a_kernel_that_was_not_thought_of_never_makes_it_idle(known: Facts, policy: Policy, kernel: Kernel) -> None:
    command = msgspec.structs.replace(known, kind="command", idle_after=known.idle_after or 60.0)
    less_idle_or_same(msgspec.structs.replace(command, kind="kernel", kernel=kernel), command, policy)


@given(facts, terminals, policies, ages)
def test_a_key_typed_at_its_terminal_never_makes_it_idle(
    known: Facts, terminal: TerminalUse, policy: Policy, age: float
) -> None:
    known = msgspec.structs.replace(known, has_terminal=True, terminal=terminal)
    used = TerminalUse(last_use=max(NOW - age, terminal.last_use), read=terminal.read)
    less_idle_or_same(msgspec.structs.replace(known, terminal=used), known, policy)


@given(facts, policies, st.data())
def test_more_cpu_time_in_any_interval_never_makes_it_idle(known: Facts, policy: Policy, data: st.DataObject) -> None:
    assume(len(known.cpu) > 1)
    first = data.draw(st.integers(1, len(known.cpu) - 1))
    shrinks = known.cpu[first].seconds < known.cpu[first - 1].seconds
    more = data.draw(st.sampled_from([0.05, 0.5, 3.0, 40.0]))
    assume(not shrinks)
    burst = tuple(CpuSample(s.at, s.seconds + (more if i >= first else 0)) for i, s in enumerate(known.cpu))
    less_idle_or_same(msgspec.structs.replace(known, cpu=burst), known, policy)


@given(facts, policies, moments)
def test_a_resume_never_makes_it_idle(known: Facts, policy: Policy, at: float) -> None:
    less_idle_or_same(msgspec.structs.replace(known, last_resume=max(at, known.last_resume or 0)), known, policy)


@given(facts, policies, st.sampled_from([{"kernel": None}, {"cpu": ()}, {"terminal": None}]))
def test_losing_a_sensor_never_makes_it_idle(known: Facts, policy: Policy, lost: dict[str, object]) -> None:
    less_idle_or_same(msgspec.structs.replace(known, **lost), known, policy)


@given(facts, policies, st.data())
def test_losing_a_cpu_sample_never_makes_it_idle(known: Facts, policy: Policy, data: st.DataObject) -> None:
    """Any but the newest, whose loss is a sensor that falls silent and grows stale.

    Totals grow here: that one shrank (a process ended uncounted) is known only from the sample that showed it.
    """
    assume(len(known.cpu) > 1)
    assume(all(before.seconds <= after.seconds for before, after in itertools.pairwise(known.cpu)))
    lost = data.draw(st.integers(0, len(known.cpu) - 2))
    less_idle_or_same(msgspec.structs.replace(known, cpu=known.cpu[:lost] + known.cpu[lost + 1 :]), known, policy)


@given(facts, policies, st.sampled_from(["kernel", "cpu", "terminal"]))
def test_a_sensor_that_has_gone_stale_never_makes_it_idle(known: Facts, policy: Policy, sensor: str) -> None:
    late = policy.stale_after + 1.0
    if sensor == "kernel":
        stale = with_kernel(known, heard=NOW - late)
    elif sensor == "terminal":
        assume(known.terminal is not None)
        assert known.terminal is not None
        stale = msgspec.structs.replace(known, terminal=TerminalUse(known.terminal.last_use, read=NOW - late))
    else:
        assume(known.cpu)
        shift = NOW - late - known.cpu[-1].at
        stale = msgspec.structs.replace(known, cpu=tuple(CpuSample(s.at + shift, s.seconds) for s in known.cpu))
    needs = {"kernel": known.kind == "kernel", "terminal": known.has_terminal, "cpu": True}
    if needs[sensor]:
        assert judge(stale, policy).verdict != "idle"
        assert due(judge(stale, policy), policy, stale) is None


@given(facts, policies)
def test_only_the_idle_are_ever_due_and_never_before_their_limit(known: Facts, policy: Policy) -> None:
    verdict = judge(known, policy)
    if due(verdict, policy, known) is not None:
        assert verdict.verdict == "idle"
        assert NOW - verdict.since >= policy.limit(known.idle_after)


@given(facts, policies)
def test_every_verdict_is_told_in_one_sentence(known: Facts, policy: Policy) -> None:
    verdict = judge(known, policy)
    assert verdict.sentence.endswith(".")
    assert ". " not in verdict.sentence
    assert verdict.would_change


@pytest.mark.parametrize("figure", ["0.700 of a core", "threshold 0.02"])
def test_the_sentence_carries_the_figures(figure: str) -> None:
    cpu = tuple(CpuSample(NOW - 60 + 10 * i, 7.0 * i) for i in range(7))
    verdict = judge(Facts(now=NOW, started=NOW - 900, cpu=cpu), Policy())
    assert verdict.verdict == "busy"
    assert figure in verdict.sentence
