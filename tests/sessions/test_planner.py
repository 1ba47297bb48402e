"""The plan of every transition, and what each interrupted prefix of it means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.model import Caller, Launch, OperationKind, Session, State
from torpor.sessions import planner
from torpor.sessions.planner import Outcome, Remains

SAVING = (OperationKind.CHECKPOINT, OperationKind.HIBERNATE)


def a_session(kind: str = "command") -> Session:
    return Session(
        id="s-1",
        name="one",
        state=State.RUNNING,
        uid=0,
        owner="root",
        node="here",
        created=0.0,
        launch=Launch(argv=("true",), cwd="/", env={}),
        caller=Caller(uid=0, gid=0),
        kind=kind,
    )


def prefixes(kind: OperationKind) -> list[tuple[str, ...]]:
    plan = planner.steps(kind, a_session("kernel"))
    return [plan[:length] for length in range(len(plan) + 1)]


@pytest.mark.parametrize("kind", SAVING)
@pytest.mark.parametrize("session", [a_session("command"), a_session("kernel")])
def test_a_checkpoint_is_durable_and_verified_before_the_process_may_end(kind: OperationKind, session: Session) -> None:
    plan = planner.steps(kind, session)
    assert plan.index("seal") < plan.index("commit") < plan.index("verify")
    if kind is OperationKind.HIBERNATE:
        assert plan.index("verify") < plan.index("end")
        assert ("quiesce" in plan) == (session.kind == "kernel")
    else:
        assert "end" not in plan
    assert plan[-1] == "record"


def test_a_resumed_session_is_on_record_before_it_runs() -> None:
    plan = planner.steps(OperationKind.RESUME, a_session())
    assert (
        plan.index("lease")
        < plan.index("compatibility")
        < plan.index("lay_out")
        < plan.index("restore")
        < plan.index("run")
        < plan.index("complete")
    )


@pytest.mark.parametrize("kind", SAVING)
@given(committed=st.booleans(), verified=st.booleans())
def test_a_living_session_goes_on_running_wherever_saving_stopped(
    kind: OperationKind, committed: bool, verified: bool
) -> None:
    for done in prefixes(kind):
        outcome = planner.outcome(kind, done, Remains(True, committed, committed and verified))
        assert outcome in (Outcome.RUNNING_UNDONE, Outcome.RUNNING_COMPLETED)


def test_a_session_ended_by_its_hibernation_is_hibernated_at_every_later_step() -> None:
    for done in prefixes(OperationKind.HIBERNATE):
        if "verify" in done:
            outcome = planner.outcome(OperationKind.HIBERNATE, done, Remains(init_alive=False, committed=True))
            assert outcome is Outcome.HIBERNATED_COMPLETED


def test_a_session_that_dies_before_its_checkpoint_was_verified_died_by_itself() -> None:
    for done in prefixes(OperationKind.HIBERNATE):
        if "verify" not in done:
            assert planner.outcome(OperationKind.HIBERNATE, done, Remains(False, False)) is Outcome.DIED


def test_a_session_whose_memory_was_lost_while_it_ran_is_ended() -> None:
    for done in prefixes(OperationKind.RESUME):
        outcome = planner.outcome(OperationKind.RESUME, done, Remains(init_alive=False, memory_lost=True))
        assert outcome is (Outcome.LOST if "run" in done else Outcome.AWAY_UNDONE)


@given(alive=st.booleans())
def test_an_interrupted_resume_leaves_the_session_running_or_away(alive: bool) -> None:
    for done in prefixes(OperationKind.RESUME):
        outcome = planner.outcome(OperationKind.RESUME, done, Remains(init_alive=alive))
        if "restore" in done and alive:
            assert outcome is Outcome.RUNNING_COMPLETED
        else:
            assert outcome is Outcome.AWAY_UNDONE


def test_a_checkpoint_that_was_verified_is_kept_when_only_its_record_is_missing() -> None:
    done = planner.CHECKPOINT_STEPS[:-1]
    assert planner.outcome(OperationKind.CHECKPOINT, done, Remains(True, True)) is Outcome.RUNNING_COMPLETED
