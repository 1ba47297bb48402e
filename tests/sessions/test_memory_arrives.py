"""Memory that arrives while the session runs: every byte is right, whatever the session does and whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.sessions.stage import Stage, Worker, eventually

from torpor.engine import page_server
from torpor.engine.page_source import GUARDIAN_NAME, SERVER_NAME
from torpor.model import OperationKind, Session, State
from torpor.sessions import resuming

REMEMBERER = (Path(__file__).parent / "creatures" / "rememberer.py").read_text()


class Arrival:
    """A hibernated session on its way back; nothing arrives by itself until `let_arrive`."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.folder = stage.home / "told"
        self.folder.mkdir()
        self.hold = stage.home / "hold"
        self.hold.touch()
        self.session: Session = stage.start(REMEMBERER, str(self.folder))
        self.said("ready")
        stage.run(self.session, OperationKind.HIBERNATE)
        self.worker: Worker = self.resume()

    def resume(self) -> Worker:
        environment = {page_server.HOLD: str(self.hold), resuming.LAZY_FROM: "0"}
        worker = self.stage.begin(self.stage.session(self.session), OperationKind.RESUME, **environment)
        eventually(lambda: self.stage.session(self.session).state, lambda state: state is State.RUNNING)
        return worker

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def said(self, line: str) -> None:
        seen = self.stage.wait_for_output(
            self.session, lambda lines: line in lines or any("Error" in one or "[" in one for one in lines)
        )
        assert line in seen, (seen, (self.stage.paths.session(self.session.id) / "err.log").read_text())

    def let_arrive(self) -> None:
        self.hold.unlink()

    def serving(self, name: str) -> list[int]:
        """Processes of this stage's page source that have this name."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if (entry / "comm").read_text().strip() == name and any(
                    str(self.stage.paths.run / "page-sources") in os.readlink(fd) for fd in (entry / "fd").iterdir()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill(self, name: str) -> None:
        (pid,) = eventually(lambda: self.serving(name), lambda pids: len(pids) == 1)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self.serving(name), lambda pids: pid not in pids and len(pids) == 1)

    def completed(self) -> None:
        self.worker.wait()
        operation = self.stage.registry.operation(self.worker.operation.id)
        assert operation.outcome == "completed", operation.error
        assert self.stage.session(self.session).state is State.RUNNING
        assert not list((self.stage.paths.run / "page-sources").iterdir())


@pytest.fixture
def arrival(stage: Stage) -> Arrival:
    return Arrival(stage)


@contextmanager
def killing(arrival: Arrival, *names: str) -> Iterator[None]:
    """Kills processes of the page source, one after another, again and again."""
    enough = threading.Event()

    def kill() -> None:
        chosen = random.Random(1)
        while not enough.wait(chosen.uniform(0.05, 0.5)):  # time enough to serve something before the next one
            for name in names:
                arrival.kill(name)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        enough.set()
        killer.join()


def test_a_session_does_everything_to_memory_that_has_not_arrived(arrival: Arrival) -> None:
    arrival.tell("go")
    arrival.said("did everything")
    arrival.tell("check-0")
    arrival.said("checked 0 True")
    assert arrival.stage.registry.operation(arrival.worker.operation.id).ended is None
    arrival.let_arrive()
    arrival.completed()
    arrival.tell("check-1")
    arrival.said("checked 1 True")
    arrival.stage.run(arrival.stage.session(arrival.session), OperationKind.HIBERNATE)
    arrival.worker = arrival.resume()
    arrival.tell("check-2")
    arrival.said("checked 2 True")
    arrival.completed()


def test_a_session_does_everything_while_its_memory_arrives(arrival: Arrival) -> None:
    arrival.let_arrive()
    arrival.tell("go")
    arrival.said("did everything")
    arrival.tell("check-0")
    arrival.completed()
    arrival.tell("check-1")
    arrival.said("checked 1 True")


@pytest.mark.parametrize("names", [(SERVER_NAME,), (GUARDIAN_NAME,), (SERVER_NAME, GUARDIAN_NAME)])
def test_the_page_source_is_killed_again_and_again(arrival: Arrival, names: tuple[str, ...]) -> None:
    with killing(arrival, *names):
        arrival.tell("go")
        arrival.said("did everything")
        arrival.tell("check-0")
        arrival.said("checked 0 True")
    arrival.let_arrive()
    arrival.completed()
    arrival.tell("check-1")
    arrival.said("checked 1 True")
