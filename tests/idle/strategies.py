"""Facts of all kinds for the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from torpor.idle.facts import CpuSample, Facts, TerminalUse
from torpor.idle.policy import Policy
from torpor.model import Kernel

NOW = 1_000_000.0

ages = st.one_of(st.floats(0, 120), st.floats(0, 8000), st.floats(-20, 0))
moments = ages.map(lambda age: NOW - age)
readings = st.one_of(*[st.floats(0, 50)] * 8, ages).map(lambda age: NOW - age)

kernels = st.builds(
    Kernel,
    execution_state=st.sampled_from(["idle"] * 9 + ["busy", "starting", "unknown"]),
    since=moments,
    queued=st.sampled_from([0] * 8 + [1, 3]),
    waiting_for_input=st.sampled_from([False] * 9 + [True]),
    last_message=moments,
    heard=readings,
)


@st.composite
def cpu_samples(draw: st.DrawFn) -> tuple[CpuSample, ...]:
    """Samples in order, with idle stretches, bursts, gaps, and now and then a total that shrinks."""
    steps = draw(
        st.lists(st.tuples(st.floats(0.5, 90), st.sampled_from([0, 0, 0, 0.01, 0.3, 1.3, 5, -1])), max_size=25)
    )
    at, seconds, samples = NOW - draw(st.floats(0, 100)), 500.0, []
    for step, used in reversed(steps):
        samples.append(CpuSample(at, seconds))
        at, seconds = at - step, seconds - used
    return tuple(reversed(samples))


terminals = st.builds(TerminalUse, last_use=moments, read=readings)

facts = st.builds(
    Facts,
    now=st.just(NOW),
    started=st.floats(0, 9000).map(lambda age: NOW - age),
    kind=st.sampled_from(["kernel", "command"]),
    kernel=st.one_of(st.none(), *[kernels] * 8),
    cpu=cpu_samples(),
    has_terminal=st.booleans(),
    terminal=st.one_of(st.none(), *[terminals] * 8),
    last_resume=st.none() | moments,
    last_refusal=st.none() | moments,
    idle_after=st.none() | st.floats(1, 400) | st.floats(1, 4000),
)

policies = st.builds(
    Policy,
    idle_after=st.floats(1, 4000),
    action=st.sampled_from(["hibernate", "none"]),
    unattended=st.sampled_from(["hibernate", "none"]),
    cpu_threshold=st.floats(0.001, 0.5),
    cpu_window=st.floats(2, 120),
    stale_after=st.one_of(st.floats(1, 200), *[st.floats(60, 200)] * 4),
    retry_after=st.floats(1, 1000),
)
