"""The verdict: a pure function from facts to busy, idle or unknown, with a sentence that carries the figures.

Each signal is judged alone: does it say busy now, is it unknown, until when was the session last used by it? The
session is idle only when every signal says so, and its idleness counts from the latest use of all of them. That is
why one more busy signal, or one sensor less, can never make a session idle.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from torpor.durations import spoken_duration
from torpor.idle import cpu
from torpor.idle.facts import Facts
from torpor.idle.policy import Policy

Answer = Literal["busy", "idle", "unknown"]
CLOCK_SLACK = 5.0  # seconds that a reading may lie in the future before the clocks are not believed


class Verdict(msgspec.Struct, frozen=True):
    """What is known of a session's use. `since` is seconds since the epoch: idle since the last use, busy since its
    start (for CPU time: the last use that was seen), unknown since the last reading. `sentence` says why with the
    figures, `would_change` what would change it and what comes next."""

    verdict: Answer
    since: float
    sentence: str
    would_change: str


class Signal(msgspec.Struct, frozen=True):
    """What one sensor says. `since`: last use when idle, start when busy, last reading when unknown."""

    answer: Answer
    since: float
    clause: str
    would_change: str = ""


def judge(facts: Facts, policy: Policy) -> Verdict:
    """Whether the session is in use, from `facts` alone. A signal that is unknown or stale counts as busy."""
    signals = _signals(facts, policy)
    for answer in ("busy", "unknown"):
        told = [signal for signal in signals if signal.answer == answer]
        if told:
            lead = "Busy" if answer == "busy" else "Unknown, which counts as busy"
            clauses = "; ".join(signal.clause for signal in told)
            change = " ".join(signal.would_change for signal in told)
            return Verdict(told[0].answer, min(signal.since for signal in told), f"{lead}: {clauses}.", change)
    since = max([facts.started, facts.last_resume or 0.0, *(signal.since for signal in signals)])
    idle_for = max(facts.now - since, 0.0)
    sentence = f"Idle for {spoken_duration(idle_for)}: {'; '.join(signal.clause for signal in signals)}."
    return Verdict("idle", since, sentence, _outlook(idle_for, facts, policy))


def due(verdict: Verdict, policy: Policy, facts: Facts) -> str | None:
    """The action that is due now ("hibernate"), or None. Never on a verdict other than idle."""
    limit = policy.limit(facts.idle_after)
    if verdict.verdict != "idle" or facts.now - verdict.since < limit:
        return None
    if facts.last_refusal is not None and facts.now - facts.last_refusal < policy.retry_after:
        return None
    action = _action(facts, policy)
    return None if action == "none" else action


def _signals(facts: Facts, policy: Policy) -> list[Signal]:
    signals = [_cpu(facts, policy)]
    if facts.kind == "kernel":
        signals.insert(0, _kernel(facts, policy))
    if facts.has_terminal:
        signals.append(_terminal(facts, policy))
    return signals


def _kernel(facts: Facts, policy: Policy) -> Signal:
    kernel = facts.kernel
    if kernel is None:
        return Signal("unknown", facts.started, "its relay has not spoken yet", "Its relay's first report.")
    if not _fresh(kernel.heard, facts, policy):
        clause = f"its relay last spoke {_ago(kernel.heard, facts)}"
        return Signal("unknown", kernel.heard, clause, "Its relay speaking again.")
    for_long = spoken_duration(facts.now - kernel.since)
    only = "" if kernel.lossless else " Before that it cannot be saved: this kernel speaks TCP only."
    if kernel.waiting_for_input:
        clause = f"a cell has been waiting for input() for {for_long}"
        return Signal("busy", kernel.since, clause, f"Answering the input().{only}")
    if kernel.execution_state == "busy":
        clause = f"its kernel has been running a cell for {for_long}"
        return Signal("busy", kernel.since, clause, f"The end of that cell.{only}")
    if kernel.queued > 0:
        requests = "1 request is" if kernel.queued == 1 else f"{kernel.queued} requests are"
        return Signal("busy", kernel.since, f"{requests} queued for its kernel", "The answers to what is queued.")
    if kernel.execution_state != "idle":
        clause = f"its kernel's state is {kernel.execution_state!r}"
        return Signal("unknown", kernel.since, clause, "The kernel saying that it is idle.")
    used = max(kernel.since, kernel.last_message)
    return Signal("idle", used, f"its kernel was last used {_ago(used, facts)} and nothing is queued")


def _cpu(facts: Facts, policy: Policy) -> Signal:
    window = min(policy.cpu_window, policy.limit(facts.idle_after))
    used = cpu.last_use(facts.cpu, policy.cpu_threshold, window)
    recent = cpu.rate(facts.cpu, window)
    if used is None or recent is None:
        at = facts.cpu[-1].at if facts.cpu else facts.started
        return Signal("unknown", at, "its processes' CPU time is not known yet", "Two readings of their CPU time.")
    newest = facts.cpu[-1].at
    if not _fresh(newest, facts, policy):
        clause = f"its processes' CPU time was last read {_ago(newest, facts)}"
        return Signal("unknown", newest, clause, "A new reading of their CPU time.")
    fraction, length = recent
    figures = (
        f"its processes used {fraction:.3f} of a core over the last {spoken_duration(length)}"
        f" (threshold {policy.cpu_threshold:g})"
    )
    if facts.now - used < window:
        change = f"Staying below the threshold for {spoken_duration(window)}."
        if used > facts.cpu[0].at:
            return Signal("busy", used, figures, change)
        return Signal("unknown", used, f"{figures}, and nothing is known of the time before", change)
    return Signal("idle", used, figures)


def _terminal(facts: Facts, policy: Policy) -> Signal:
    terminal = facts.terminal
    if terminal is None or not _fresh(terminal.read, facts, policy):
        read = facts.started if terminal is None else terminal.read
        return Signal("unknown", read, "its terminal's last use is not known", "A new reading of its terminal.")
    return Signal("idle", terminal.last_use, f"its terminal was last used {_ago(terminal.last_use, facts)}")


def _fresh(read: float, facts: Facts, policy: Policy) -> bool:
    return -CLOCK_SLACK <= facts.now - read <= policy.stale_after


def _action(facts: Facts, policy: Policy) -> str:
    asked_for = facts.wakes_by_itself or facts.idle_after is not None
    return policy.action if asked_for or policy.action == "none" else policy.unattended


def _outlook(idle_for: float, facts: Facts, policy: Policy) -> str:
    starts_again = "Any use starts the count again"
    if _action(facts, policy) == "none":
        if policy.action == "none":
            return f"{starts_again}; the policy does nothing to idle sessions."
        return f"{starts_again}; nothing wakes this command by itself, so it is left alone without --idle-after."
    limit = policy.limit(facts.idle_after)
    if idle_for < limit:
        left = spoken_duration(limit - idle_for)
        return f"{starts_again}; it is hibernated in {left}, after {spoken_duration(limit)} of idleness."
    if facts.last_refusal is not None and facts.now - facts.last_refusal < policy.retry_after:
        left = spoken_duration(facts.last_refusal + policy.retry_after - facts.now)
        return f"{starts_again}; the last attempt to hibernate it did not succeed, the next is in {left}."
    return f"{starts_again}; it is due to be hibernated now (limit {spoken_duration(limit)})."


def _ago(at: float, facts: Facts) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(at))
    return f"{spoken_duration(facts.now - at)} ago (at {clock})"
