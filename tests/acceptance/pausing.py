"""Operations that stop after a step, as TORPOR_PAUSE_AFTER asks of their worker, until the test lets them go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.installation import PATIENCE, Installation, eventually, is_alive

from torpor.engine import procfs
from torpor.model import Operation, ProcessId


@contextmanager
def paused(agent: Installation, name: str, kind: str, step: str) -> Iterator[ProcessId]:
    """Inside, the operation has stopped after `step`, its worker is given; it goes on afterwards, to its end.

    Works with an agent that was started with TORPOR_PAUSE_AFTER=KIND:STEP, and that may be killed inside.
    """
    session = agent.client.session(name)["id"]
    with agent.registry() as registry, open(agent.home / "command.log", "ab") as log:
        earlier = registry.last_operation(session)
        command = [sys.executable, "-m", "torpor", kind, name, "--json"]
        with subprocess.Popen(command, env=agent.environment, stdout=log, stderr=log) as asking:
            operation = eventually(
                lambda: registry.last_operation(session), lambda last: last != earlier and has_paused(last, step)
            )
            assert operation is not None
            assert operation.worker is not None
            yield operation.worker
            if is_alive(operation.worker):
                go_on(operation.worker)
            eventually(lambda: is_alive(operation.worker), lambda lives: not lives)
            eventually(lambda: registry.operation(operation.id).ended, bool)
            asking.wait(PATIENCE)


def has_paused(operation: Operation | None, step: str) -> bool:
    """Whether the worker of this operation waits after this step."""
    if operation is None or operation.worker is None:
        return False
    reached = operation.ended is not None if step == operation.steps[-1] else step in operation.done
    return reached and _waits_for_a_signal(operation.worker.pid)


def _waits_for_a_signal(pid: int) -> bool:
    try:
        return "sigtimedwait" in Path(f"/proc/{pid}/wchan").read_text()
    except FileNotFoundError:
        return False


def go_on(process: ProcessId) -> None:
    """Ends the pause of exactly this process."""
    pidfd = os.pidfd_open(process.pid)
    try:
        assert procfs.start_time(process.pid) == process.start_time
        signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
    finally:
        os.close(pidfd)
