"""The files of an adopted tree: given back as to every session, and nothing else in their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adopt.programs import PYTHON, Program, adopted
from tests.installation import eventually
from tests.sessions.stage import Stage

from torpor.engine import affinity
from torpor.model import OperationKind, Session, State

OLD, NEW = "what it read first", "nobody shows it so"
AS_IT_WAS = f"{OLD} {OLD} True False"
READER = """
import mmap, os, sys, threading, time
opened, folder = open(sys.argv[1]), os.open(sys.argv[2], os.O_RDONLY)
with open(sys.argv[3], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
processes, shared = os.open("/proc", os.O_RDONLY), os.open("/dev/shm", os.O_RDONLY)
os.chdir(sys.argv[2])
threading.Thread(target=lambda: (os.sched_setaffinity(0, [0]), time.sleep(10**6)), daemon=True).start()
while True:
    opened.seek(0)
    own = str(os.getpid()) in os.listdir(processes)
    print(opened.read(), mapped[:].decode(), own, os.path.exists("inside"), flush=True)
    time.sleep(0.05)
"""
Start = Callable[..., Program]


@pytest.fixture
def folder(stage: Stage) -> Path:
    """What the program uses, and beside it what it must never see."""
    folder = stage.home / "files"
    for name, content in (("mine", OLD), ("secret", NEW)):
        (folder / name / "folder").mkdir(parents=True)
        for file in ("opened", "mapped"):
            (folder / name / file).write_text(content)
    (folder / "secret" / "folder" / "inside").touch()
    return folder


def away(stage: Stage, start: Start, folder: Path) -> tuple[Program, Session]:
    """The program, adopted and hibernated."""
    mine = folder / "mine"
    program = start(PYTHON, "-I", "-S", "-c", READER, *(str(mine / one) for one in ("opened", "folder", "mapped")))
    program.printed(AS_IT_WAS)
    session = adopted(stage, program)
    stage.run(session, OperationKind.HIBERNATE)
    return program, stage.session(session)


def goes_on(stage: Stage, program: Program, session: Session) -> None:
    """It prints on, has seen nothing but what it had, and its threads are bound as they were."""
    before = len(program.output)
    eventually(lambda: len(program.output), lambda now: now > before + 2)
    assert set(program.output) == {AS_IT_WAS}
    init = stage.session(session).init
    assert init is not None
    bound = affinity.of_tree(init.pid)
    assert [0] in bound.values()
    assert bound[str(program.pid)] == sorted(os.sched_getaffinity(0))


def test_what_changed_while_it_was_away_is_as_it_was(stage: Stage, start: Start, folder: Path) -> None:
    program, session = away(stage, start, folder)
    for name in ("opened", "mapped"):
        (folder / "secret" / name).replace(folder / "mine" / name)
    stage.run(session, OperationKind.RESUME)
    goes_on(stage, program, session)
    assert any("opened was replaced" in note for note in stage.session(session).notes)
    stage.run(stage.session(session), OperationKind.HIBERNATE)
    stage.run(stage.session(session), OperationKind.RESUME)
    goes_on(stage, program, session)


@pytest.mark.parametrize("name", ["opened", "mapped", "folder"])
def test_what_is_exchanged_during_the_resume_is_not_opened(stage: Stage, start: Start, folder: Path, name: str) -> None:
    program, session = away(stage, start, folder)
    worker = stage.begin(session, OperationKind.RESUME, pause_after="lay_out")
    worker.wait_for_pause()
    path, aside, secret = folder / "mine" / name, folder / "aside", folder / "secret" / name
    path.rename(aside)
    path.symlink_to(secret)
    worker.go_on()
    worker.wait()
    operation = stage.registry.operation(worker.operation.id)
    assert operation.outcome == "undone"
    assert operation.error is not None
    assert f"{secret} was exchanged" in operation.error["message"]
    assert stage.session(session).state is State.HIBERNATED
    path.unlink()
    aside.rename(path)
    stage.run(stage.session(session), OperationKind.RESUME)
    goes_on(stage, program, session)
