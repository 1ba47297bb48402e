"""Memory that cannot be had, or whose bearers are killed, while a session runs already."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.sessions.arrival import Arrival
from tests.sessions.stage import eventually

from torpor.engine import procfs
from torpor.engine.page_source import GUARDIAN_NAME, SERVER_NAME
from torpor.errors import Conflict
from torpor.model import OperationKind, Session, State
from torpor.sessions import planner


def packs(arrival: Arrival) -> list[Path]:
    return sorted((arrival.stage.paths.store / "packs").rglob("*"))


def damage(arrival: Arrival) -> dict[Path, bytes]:
    """Turns every pack's bytes, beyond its header, over; returns what they were."""
    before = {path: path.read_bytes() for path in packs(arrival) if path.is_file()}
    for path, content in before.items():
        path.chmod(0o600)
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(bytes(byte ^ 0xFF for byte in content[4096 : 1 << 20]))
    return before


def repair(before: dict[Path, bytes]) -> None:
    for path, content in before.items():
        with open(path, "r+b") as file:
            file.write(content)


def states(session: Session) -> set[str]:
    """States of the session's processes, as the kernel shows them."""
    assert session.init is not None
    found = set()
    for pid in procfs.tree(session.init.pid):
        found.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return found


def assert_lost(arrival: Arrival, words: str, init: int) -> None:
    ended = arrival.stage.session(arrival.session)
    assert ended.state is State.FAILED
    assert ended.init is None
    assert ended.error is not None
    assert words in ended.error["message"]
    assert procfs.tree(init) == []
    (checkpoint,) = arrival.stage.registry.checkpoints(arrival.session.id)
    assert checkpoint.verified is None
    assert arrival.stage.registry.operation(arrival.worker.operation.id).outcome == "undone"
    assert arrival.stage.paths.store.joinpath("manifests").exists()


@contextmanager
def recovering(arrival: Arrival) -> Iterator[None]:
    """The worker is killed; what the agent does then goes on meanwhile, and is over afterwards."""
    arrival.worker.kill()
    with ThreadPoolExecutor(1) as threads:
        recovery = threads.submit(arrival.stage.recover, arrival.worker.operation)
        yield
        recovery.result()


def init_of(arrival: Arrival) -> int:
    init = arrival.stage.session(arrival.session).init
    assert init is not None
    return init.pid


def test_a_chunk_that_can_be_read_again_costs_a_moment_and_nothing_else(arrival: Arrival) -> None:
    before = damage(arrival)
    running = arrival.stage.session(arrival.session)
    arrival.let_arrive()
    eventually(lambda: states(running), lambda seen: seen == {"T"})
    repair(before)
    arrival.completed()
    arrival.tell("go")
    arrival.said("did everything")
    arrival.tell("check-0")
    arrival.tell("check-1")
    arrival.said("checked 1 True")
    (checkpoint,) = arrival.stage.registry.checkpoints(arrival.session.id)
    assert checkpoint.verified is not None


def test_a_lost_chunk_ends_the_session_and_keeps_its_checkpoints(arrival: Arrival) -> None:
    init = init_of(arrival)
    damage(arrival)
    arrival.let_arrive()
    arrival.worker.wait()
    assert_lost(arrival, "chunk", init)


def test_a_lost_chunk_ends_the_session_when_its_worker_is_dead_too(arrival: Arrival) -> None:
    init = init_of(arrival)
    damage(arrival)
    with recovering(arrival):
        arrival.let_arrive()
    assert_lost(arrival, "chunk", init)


def test_when_all_who_held_its_memory_are_killed_at_once_the_session_is_ended(arrival: Arrival) -> None:
    init = init_of(arrival)
    pids = arrival.serving(GUARDIAN_NAME) + arrival.serving(SERVER_NAME)
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, signum)
    arrival.worker.wait()
    assert_lost(arrival, "killed", init)


def test_a_worker_that_is_killed_leaves_the_page_source_at_work(arrival: Arrival) -> None:
    with recovering(arrival):
        arrival.tell("go")
        arrival.said("did everything")
        assert arrival.stage.registry.operation(arrival.worker.operation.id).ended is None
        arrival.let_arrive()
    operation = arrival.stage.registry.operation(arrival.worker.operation.id)
    assert (operation.outcome, arrival.stage.session(arrival.session).state) == ("completed", State.RUNNING)
    arrival.tell("check-0")
    arrival.tell("check-1")
    arrival.said("checked 1 True")


def test_worker_keeper_and_page_source_are_killed_together(arrival: Arrival) -> None:
    with recovering(arrival):
        arrival.stage.kill_keeper()
        arrival.kill(SERVER_NAME)
        arrival.tell("go")
        arrival.said("did threads_touch")
        arrival.kill(GUARDIAN_NAME)
        arrival.said("did everything")
        arrival.let_arrive()
    assert arrival.stage.registry.operation(arrival.worker.operation.id).outcome == "completed"
    arrival.tell("check-0")
    arrival.tell("check-1")
    arrival.said("checked 1 True")


def test_a_session_is_not_saved_before_it_is_complete(arrival: Arrival) -> None:
    session = arrival.stage.session(arrival.session)
    for kind in (OperationKind.CHECKPOINT, OperationKind.HIBERNATE):
        with pytest.raises(Conflict, match="in progress"):
            arrival.stage.registry.begin_operation(session.id, kind, planner.steps(kind, session))
    arrival.let_arrive()
    arrival.completed()
    arrival.stage.run(session, OperationKind.HIBERNATE)


def test_a_session_that_ends_while_its_memory_arrives_is_no_loss(arrival: Arrival) -> None:
    os.kill(init_of(arrival), signal.SIGKILL)
    arrival.let_arrive()
    arrival.completed()
    (checkpoint,) = arrival.stage.registry.checkpoints(arrival.session.id)
    assert checkpoint.verified is not None
