"""The registry: one truth for several threads and processes, whatever dies in between."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.errors import Conflict, NewerFormat, NotFound, StoreError
from torpor.model import Caller, Checkpoint, Launch, OperationKind, ProcessId, Session, State
from torpor.sessions.registry import Registry

STEPS = ("freeze", "commit", "end")


def a_session(identity: str = "s1", name: str = "one", uid: int = 0, state: State = State.RUNNING) -> Session:
    return Session(
        id=identity,
        name=name,
        state=state,
        uid=uid,
        owner="root",
        node="n",
        created=1.0,
        launch=Launch(argv=("true",), cwd="/", env={}),
        caller=Caller(uid=uid, gid=0),
    )


def a_checkpoint(identity: str, created: float) -> Checkpoint:
    return Checkpoint(identity, "s1", OperationKind.CHECKPOINT, created, None, 10, 5, 5, {"total": 1.0})


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "torpor.db")


def test_a_session_comes_back_as_it_was_stored(registry: Registry, tmp_path: Path) -> None:
    stored = registry.create_session(a_session())
    assert registry.session("s1") == stored
    assert Registry(tmp_path / "torpor.db").by_name(0, "one") == stored
    assert registry.by_name(1, "one") is None
    with pytest.raises(NotFound):
        registry.session("s2")


def test_the_file_is_for_its_owner_only(registry: Registry, tmp_path: Path) -> None:
    registry.create_session(a_session())
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in tmp_path.iterdir())


def test_names_are_unique_for_each_owner(registry: Registry) -> None:
    registry.create_session(a_session())
    with pytest.raises(Conflict, match="already have a session named one"):
        registry.create_session(a_session("s2"))
    registry.create_session(a_session("s3", uid=7))
    assert [session.id for session in registry.sessions()] == ["s1", "s3"]
    assert [session.id for session in registry.sessions(7)] == ["s3"]


def test_the_version_grows_with_the_state_and_only_with_it(registry: Registry) -> None:
    registry.create_session(a_session())
    assert registry.update_session("s1", labels={"a": "b"}).version == 0
    assert registry.update_session("s1", state=State.FAILED, exit_status=3).version == 1
    assert registry.update_session("s1", state=State.FAILED).version == 1


def test_a_transition_from_an_unexpected_state_changes_nothing(registry: Registry) -> None:
    registry.create_session(a_session())
    with pytest.raises(Conflict, match="one is running; this needs it to be ended or failed"):
        registry.transition("s1", {State.FAILED, State.ENDED}, State.HIBERNATED)
    assert registry.session("s1").version == 0
    assert registry.transition("s1", {State.RUNNING}, State.ENDED, exit_status=0).exit_status == 0


def test_one_operation_of_a_session_at_a_time(registry: Registry) -> None:
    registry.create_session(a_session())
    operation = registry.begin_operation("s1", OperationKind.HIBERNATE, STEPS)
    assert registry.session("s1").state is State.HIBERNATING
    assert registry.open_operations() == [operation]
    with pytest.raises(Conflict, match="A hibernate of session one is in progress"):
        registry.begin_operation("s1", OperationKind.CHECKPOINT, STEPS)
    with pytest.raises(Conflict, match="in progress"):
        registry.delete_session("s1")
    registry.mark_step(operation.id, "freeze")
    registry.note_worker(operation.id, ProcessId(1, 2, "boot"))
    registry.note_processes(operation.id, [ProcessId(3, 4, "boot")])
    session = registry.finish_operation(operation.id, "completed", State.HIBERNATED, result={"id": "c"}, init=None)
    assert (session.state, session.version) == (State.HIBERNATED, 2)
    ended = registry.operation(operation.id)
    assert (ended.done, ended.outcome, ended.before) == (("freeze",), "completed", State.RUNNING)
    assert registry.open_operations() == []
    with pytest.raises(Conflict, match="already ended"):
        registry.finish_operation(operation.id, "undone", State.RUNNING)


def test_an_operation_is_refused_by_a_state_that_forbids_it(registry: Registry) -> None:
    registry.create_session(a_session())
    with pytest.raises(Conflict, match="one is running; resume needs it to be"):
        registry.begin_operation("s1", OperationKind.RESUME, STEPS)
    assert registry.last_operation("s1") is None


def test_an_undone_operation_keeps_its_error_on_the_session(registry: Registry) -> None:
    registry.create_session(a_session())
    operation = registry.begin_operation("s1", OperationKind.CHECKPOINT, STEPS)
    registry.finish_operation(operation.id, "undone", State.RUNNING, error={"code": "engine", "message": "no"})
    assert registry.session("s1").error == {"code": "engine", "message": "no"}
    last = registry.last_operation("s1")
    assert last is not None
    assert last.error == {"code": "engine", "message": "no"}


def test_only_the_newest_lease_counts(registry: Registry) -> None:
    registry.create_session(a_session())
    first = registry.take_lease("s1")
    second = registry.take_lease("s1")
    assert second == first + 1
    registry.check_lease("s1", second)
    with pytest.raises(Conflict, match="resumed by another operation"):
        registry.check_lease("s1", first)


def test_checkpoints_are_listed_newest_first(registry: Registry) -> None:
    registry.create_session(a_session())
    registry.add_checkpoint(a_checkpoint("old", 1.0))
    registry.add_checkpoint(a_checkpoint("new", 2.0))
    registry.mark_verified("old", 5.0)
    assert [(c.id, c.verified) for c in registry.checkpoints("s1")] == [("new", None), ("old", 5.0)]
    registry.delete_checkpoint("new")
    with pytest.raises(NotFound):
        registry.checkpoint("new")
    registry.delete_session("s1")
    assert registry.checkpoints("s1") == []


def test_a_newer_schema_is_refused(registry: Registry, tmp_path: Path) -> None:
    registry.close()
    with sqlite3.connect(tmp_path / "torpor.db") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(NewerFormat, match="has format 99"):
        Registry(tmp_path / "torpor.db")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torpor.db").write_bytes(b"x" * 8192)
    with pytest.raises(StoreError, match="cannot be opened"):
        Registry(tmp_path / "torpor.db")


TAKE_LEASES = """
import sys
from pathlib import Path
from torpor.sessions.registry import Registry
registry = Registry(Path(sys.argv[1]))
for _ in range(40):
    registry.take_lease("s1")
"""


def test_several_processes_lose_no_update(registry: Registry, tmp_path: Path) -> None:
    registry.create_session(a_session())
    command = [sys.executable, "-c", TAKE_LEASES, str(tmp_path / "torpor.db")]
    writers = [subprocess.Popen(command) for _ in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert registry.session("s1").lease == 120


DIE_INSIDE = """
import os, signal, sys
from pathlib import Path
from torpor.model import OperationKind
from torpor.sessions.registry import Registry
registry = Registry(Path(sys.argv[1]))
registry._change = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
registry.begin_operation("s1", OperationKind.HIBERNATE, ("freeze",))
"""


def test_a_process_killed_inside_a_transaction_leaves_nothing_of_it(registry: Registry, tmp_path: Path) -> None:
    registry.create_session(a_session())
    died = subprocess.run([sys.executable, "-c", DIE_INSIDE, str(tmp_path / "torpor.db")], check=False, timeout=60)
    assert died.returncode == -9
    assert registry.open_operations() == []
    assert registry.session("s1").state is State.RUNNING
    registry.begin_operation("s1", OperationKind.HIBERNATE, STEPS)
