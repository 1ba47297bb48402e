"""A hibernated session on its way back, held where most of its memory has not arrived."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.sessions.stage import Stage, Worker, eventually

from torpor.engine import page_bringer
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
        environment = {page_bringer.HOLD: str(self.hold), resuming.LAZY_FROM: "0"}
        worker = self.stage.begin(self.stage.session(self.session), OperationKind.RESUME, **environment)
        eventually(lambda: self.stage.session(self.session).state, lambda state: state is State.RUNNING)
        return worker

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def said(self, line: str) -> None:
        seen = self.stage.wait_for_output(
            self.session, lambda lines: line in lines or any("Error" in one or "[" in one for one in lines)
        )
        assert line in seen, seen

    def let_arrive(self) -> None:
        self.hold.unlink()

    def serving(self, name: str) -> list[int]:
        """Processes of this stage's page source that have this name."""
        return serving(self.stage, name)

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


def serving(stage: Stage, name: str) -> list[int]:
    """Processes of this stage's page source that have this name."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "comm").read_text().strip() == name and any(
                str(stage.paths.run / "page-sources") in os.readlink(fd) for fd in (entry / "fd").iterdir()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
