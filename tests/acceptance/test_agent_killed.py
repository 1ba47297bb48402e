"""kill -9 to the agent after every step of every operation: the worker goes on, a new agent tells how it ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.acceptance.pausing import paused
from tests.acceptance.traces import assert_as_before, processes, traces
from tests.installation import PYTHON, Installation, eventually, installations, is_alive, kill

from torpor.model import OperationKind
from torpor.sessions import planner
from torpor.sessions.executor import PAUSE_AFTER
from torpor.sessions.resuming import LAZY_FROM

COUNT = """
import os, time
memory = os.urandom(4 << 20)
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.02)
"""
AFTER = {OperationKind.CHECKPOINT: "running", OperationKind.HIBERNATE: "hibernated", OperationKind.RESUME: "running"}
PLANS = {
    OperationKind.CHECKPOINT: planner.CHECKPOINT_STEPS,
    OperationKind.HIBERNATE: planner.HIBERNATE_STEPS[1:],
    OperationKind.RESUME: planner.RESUME_STEPS,
}
KILLED_WITH_THEIR_WORKER = [
    (OperationKind.CHECKPOINT, "seal"),
    (OperationKind.HIBERNATE, "commit"),
    (OperationKind.RESUME, "lay_out"),
]
MATRIX = [(kind, step) for kind, plan in PLANS.items() for step in plan]


@pytest.fixture(scope="module")
def counting() -> Iterator[Installation]:
    """An installation with a session that counts; each test starts the agent that it needs."""
    for make in installations():
        agent = make()
        agent.start()
        agent.run(PYTHON, "-c", COUNT, name="count")
        agent.wait_for_output("count", "\n3\n")
        yield agent


def prepare(agent: Installation, kind: OperationKind, step: str) -> None:
    """The agent's operations of this kind stop after a step, and one may start."""
    wanted = "hibernated" if kind is OperationKind.RESUME else "running"
    if agent.client.session("count")["state"] != wanted:
        agent.operate("count", "hibernate" if wanted == "hibernated" else "resume")
    agent.stop()
    agent.start(**{PAUSE_AFTER: f"{kind}:{step}", LAZY_FROM: "0"})


def assert_whole(agent: Installation) -> None:
    """It runs, once, or can be brought back; it counts, and no number is missing or twice."""
    agent.stop()
    agent.start()
    if agent.client.session("count")["state"] == "hibernated":
        assert agent.client.session("count")["pids"] == []
        agent.operate("count", "resume")
    here = agent.output("count").count("\n")
    lines = agent.wait_for_output("count", f"\n{here + 3}\n").splitlines()
    assert lines == [str(number) for number in range(1, len(lines) + 1)]
    assert sum("number += N" in command for command in processes(agent).values()) == 1


@pytest.mark.parametrize(("kind", "step"), MATRIX)
def test_the_operation_is_completed_without_its_agent(counting: Installation, kind: OperationKind, step: str) -> None:
    prepare(counting, kind, step)
    with paused(counting, "count", kind, step):
        counting.kill()
        counting.start()
    session = counting.wait_for_state("count", AFTER[kind])
    assert session["error"] is None
    with counting.registry() as registry:
        operation = registry.last_operation(session["id"])
        assert operation is not None
        assert (operation.kind, operation.outcome, operation.done) == (kind, "completed", PLANS[kind][:-1])
    assert_whole(counting)


@pytest.mark.parametrize(("kind", "step"), KILLED_WITH_THEIR_WORKER)
def test_agent_and_worker_killed_together(counting: Installation, kind: OperationKind, step: str) -> None:
    """Undone with a record that says so, by the next agent; nothing of the attempt is left."""
    prepare(counting, kind, step)
    before, state = traces(counting), counting.client.session("count")["state"]
    with paused(counting, "count", kind, step) as worker:
        counting.kill()
        kill(worker)
        eventually(lambda: is_alive(worker), lambda lives: not lives)
        counting.start()
    session = counting.wait_for_state("count", state)
    assert "was interrupted" in session["error"]["message"]
    assert "as before" in session["error"]["safe"]
    with counting.registry() as registry:
        operation = registry.last_operation(session["id"])
        assert operation is not None
        assert operation.outcome == "undone"
    assert_as_before(counting, before)
    assert_whole(counting)
