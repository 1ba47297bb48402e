"""kill -9 after every step of every transition: the session is whole in every case, and nothing is left lying about."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.sessions.stage import Stage
from tests.sessions.test_transitions import COUNTER, counted

from torpor.engine import procfs
from torpor.model import OperationKind, Session, State
from torpor.sessions import planner

MATRIX = [
    (kind, step)
    for kind, plan in (
        (OperationKind.CHECKPOINT, planner.CHECKPOINT_STEPS),
        (OperationKind.HIBERNATE, planner.HIBERNATE_STEPS[1:]),
        (OperationKind.RESUME, planner.RESUME_STEPS),
    )
    for step in plan
]


def a_running_session(stage: Stage) -> Session:
    session = stage.start(COUNTER)
    stage.wait_for_output(session, lambda lines: len(lines) >= 2)
    return session


def prepared(stage: Stage, kind: OperationKind) -> Session:
    """A session for which a transition of this kind may start."""
    session = a_running_session(stage)
    if kind is OperationKind.RESUME:
        stage.run(session, OperationKind.HIBERNATE)
    return stage.session(session)


def assert_whole(stage: Stage, session: Session) -> None:
    """It counts on without a gap, its memory is intact, it can be saved and brought back, and nothing is left."""
    state = stage.session(session).state
    assert state in (State.RUNNING, State.HIBERNATED)
    if state is State.HIBERNATED:
        assert not trees_of(stage, session)
        stage.run(stage.session(session), OperationKind.RESUME)
    here = len(stage.output(session))
    assert counted(stage.wait_for_output(session, lambda lines: len(lines) > here + 2))
    assert len(trees_of(stage, session)) == 1
    assert leftovers(stage) == []
    stage.run(stage.session(session), OperationKind.HIBERNATE)
    assert not trees_of(stage, session)
    stage.run(stage.session(session), OperationKind.RESUME)
    here = len(stage.output(session))
    assert counted(stage.wait_for_output(session, lambda lines: len(lines) > here + 2))
    assert leftovers(stage) == []


def trees_of(stage: Stage, session: Session) -> list[int]:
    """Processes on the node that have this session's log open as their output: one for each copy that runs."""
    log = str(stage.paths.session(session.id) / "out.log")
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.readlink(f"/proc/{pid}/fd/1") == log and procfs.nspid(pid) != 1:
                found.append(pid)
        except OSError:
            continue
    return found


def leftovers(stage: Stage) -> list[str]:
    """Processes, mounts and scratch folders of operations of this stage that should not exist any more."""
    home = str(stage.home)
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if home in line]
    found += [
        str(path) for folder in (stage.paths.scratch, stage.paths.store / "incoming") for path in folder.iterdir()
    ]
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if home in command and "criu" in command:
            found.append(command)
    return found


@pytest.mark.parametrize(("kind", "step"), MATRIX)
def test_the_worker_is_killed(stage: Stage, kind: OperationKind, step: str) -> None:
    session = prepared(stage, kind)
    worker = stage.begin(session, kind, pause_after=step)
    worker.wait_for_pause()
    worker.kill()
    if step != "record":
        stage.recover(worker.operation)
    assert_whole(stage, session)


@pytest.mark.parametrize(("kind", "step"), MATRIX)
def test_the_keeper_is_killed(stage: Stage, kind: OperationKind, step: str) -> None:
    session = prepared(stage, kind)
    worker = stage.begin(session, kind, pause_after=step)
    worker.wait_for_pause()
    stage.kill_keeper()
    worker.go_on()
    worker.wait()
    operation = stage.registry.operation(worker.operation.id)
    assert (operation.outcome, operation.error) == ("completed", None)
    assert_whole(stage, session)
