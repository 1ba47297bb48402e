"""What becomes of a transition whose step fails, before and after the point of no return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from tests.sessions.test_registry import a_session

from torpor.errors import EngineError, StoreError, TorporError
from torpor.model import OperationKind, State
from torpor.sessions.executor import Context, Done, execute
from torpor.sessions.registry import Registry

STEPS = ("dump", "end", "record")


class Failing:
    """Fails in one step, before or after what cannot be taken back."""

    def __init__(self, step: str, failure: TorporError | OSError, *, past_return: bool) -> None:
        self._step, self._failure, self._passes = step, failure, past_return
        self.past_return = False
        self.undone = False

    def steps(self) -> dict[str, Callable[[], None]]:
        return {step: partial(self._reach, step) for step in STEPS[:-1]}

    def record(self) -> Done:
        self._reach("record")
        return Done(State.HIBERNATED, {}, {})

    def undo(self) -> None:
        self.undone = True

    def _reach(self, step: str) -> None:
        if step == self._step:
            self.past_return = self._passes
            raise self._failure


@pytest.fixture
def context(tmp_path: Path) -> Context:
    registry = Registry(tmp_path / "torpor.db")
    registry.create_session(a_session())
    operation = registry.begin_operation("s1", OperationKind.HIBERNATE, STEPS)
    nothing = cast(Any, None)
    session = registry.session("s1")
    return Context(nothing, registry, nothing, nothing, operation, session, tmp_path, lambda *_: None)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("failure", [EngineError("No."), OSError(5, "No")])
def test_what_can_be_taken_back_is(context: Context, step: str, failure: TorporError | OSError) -> None:
    transition = Failing(step, failure, past_return=False)
    with pytest.raises(EngineError):
        execute(context, transition)
    assert transition.undone
    operation = context.registry.operation(context.operation.id)
    assert (operation.outcome, context.registry.session("s1").state) == ("undone", State.RUNNING)


@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.parametrize("failure", [EngineError("No."), OSError(28, "No", "/dev/shm/x")])
def test_past_the_point_of_no_return_nothing_is_undone_and_the_operation_stays_open(
    context: Context, step: str, failure: TorporError | OSError
) -> None:
    transition = Failing(step, failure, past_return=True)
    with pytest.raises((EngineError, StoreError)):
        execute(context, transition)
    assert not transition.undone
    operation = context.registry.operation(context.operation.id)
    assert (operation.outcome, context.registry.session("s1").state) == (None, State.HIBERNATING)
