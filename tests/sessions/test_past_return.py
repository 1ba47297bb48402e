"""A real worker fails right after what cannot be taken back: no session and no checkpoint is lost."""

from __future__ import annotations

import pytest
from tests.sessions.stage import Stage
from tests.sessions.test_kill_matrix import assert_whole, prepared

from torpor.model import OperationKind, State

FAILS_IN = """
import sys
from torpor.sessions import {module}, worker

def fail(*_):
    raise OSError(28, "No space left on device")

{module}.{function} = fail
sys.exit(worker.main(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("kind", "module", "function", "state"),
    [
        (OperationKind.HIBERNATE, "saving", "wait_gone", State.HIBERNATED),
        (OperationKind.HIBERNATE, "saving", "result_of", State.HIBERNATED),
        (OperationKind.RESUME, "resuming", "tell_keeper", State.RUNNING),
    ],
)
def test_what_has_happened_counts(stage: Stage, kind: OperationKind, module: str, function: str, state: State) -> None:
    session = prepared(stage, kind)
    worker = stage.begin(session, kind, program=("-c", FAILS_IN.format(module=module, function=function)))
    worker.wait()
    assert stage.registry.operation(worker.operation.id).outcome is None
    assert stage.recover(worker.operation).state is state
    assert len(stage.registry.checkpoints(session.id)) == 1
    assert stage.registry.operation(worker.operation.id).outcome == "completed"
    assert_whole(stage, session)
