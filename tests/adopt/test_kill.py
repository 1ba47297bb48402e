"""kill -9 to the worker while it saves an adopted tree for the first time, or brings it back for the first time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adopt.programs import PYTHON, Program, adopted
from tests.installation import eventually
from tests.sessions.stage import Stage
from tests.sessions.test_kill_matrix import leftovers

from torpor.engine import procfs
from torpor.model import OperationKind, State

COUNTER = """
import subprocess, time
child = subprocess.Popen(["sleep", "1000"])
count = 0
while child.poll() is None:
    count += 1
    print(count, flush=True)
    time.sleep(0.05)
"""
MATRIX = [
    *((OperationKind.CHECKPOINT, step) for step in ("dump", "verify")),
    *((OperationKind.HIBERNATE, step) for step in ("preflight", "dump", "commit", "verify", "end", "record")),
    *((OperationKind.RESUME, step) for step in ("lay_out", "restore", "run", "record")),
]


def counts_on(program: Program) -> None:
    before = len(program.output)
    lines = eventually(lambda: program.output, lambda seen: len(seen) >= before + 3)
    assert lines == [str(number) for number in range(1, len(lines) + 1)]


def copies(program: Program) -> int:
    """How many processes on the node write into the program's output, its child not counted."""
    log = str(program.folder / "output")
    found = 0
    for pid in procfs.all_pids():
        try:
            found += os.readlink(f"/proc/{pid}/fd/1") == log and procfs.name(pid) != "sleep"
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("kind", "step"), MATRIX)
def test_the_worker_is_killed(stage: Stage, start: Callable[..., Program], kind: OperationKind, step: str) -> None:
    program = start(PYTHON, "-I", "-S", "-c", COUNTER)
    program.printed("2")
    session = adopted(stage, program)
    if kind is OperationKind.RESUME:
        stage.run(session, OperationKind.HIBERNATE)
    worker = stage.begin(stage.session(session), kind, pause_after=step)
    worker.wait_for_pause()
    worker.kill()
    if step != "record":
        stage.recover(worker.operation)

    found = stage.session(session)
    away = kind is OperationKind.HIBERNATE and step in ("end", "record")
    away = away or (kind is OperationKind.RESUME and step in ("lay_out", "restore"))
    assert found.state is (State.HIBERNATED if away else State.RUNNING)
    assert eventually(lambda: copies(program), lambda count: count == (0 if away else 1)) in (0, 1)
    assert leftovers(stage) == []
    if away:
        stage.run(found, OperationKind.RESUME)
    counts_on(program)
    stage.run(stage.session(session), OperationKind.HIBERNATE)
    stage.run(stage.session(session), OperationKind.RESUME)
    counts_on(program)
    init = stage.session(session).init
    assert init is not None
    mounts = Path(f"/proc/{init.pid}/mountinfo").read_text()
    assert str(stage.home) not in mounts
