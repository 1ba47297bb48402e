"""A whole Torpor of its own for a test: agent as a process, keeper, sessions; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torpor.client import Client
from torpor.engine import procfs
from torpor.engine.keeper_client import KeeperClient, ensure_keeper
from torpor.errors import AgentUnreachable, EngineError
from torpor.model import ProcessId, Session
from torpor.paths import Paths, from_environment
from torpor.sessions.registry import Registry

PATIENCE = 60.0  # seconds until something that must happen counts as not happening
PYTHON = "/usr/bin/python3"
T = TypeVar("T")


class Installation:
    """One TORPOR_HOME with a short path; `environment` is what its agent and its commands see."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="torpor-"))
        self.home.chmod(0o711)
        self.environment = {**os.environ, "TORPOR_HOME": str(self.home)}
        self.paths: Paths = from_environment(self.environment)
        self.client = Client(self.paths)
        self.agent: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What the agents have logged so far."""
        return (self.home / "agent.log").read_text()

    def start(self, **variables: str) -> None:
        """Starts the agent and waits until it serves."""
        with open(self.home / "agent.log", "ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "torpor", "up", "--log-level", "debug"],
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._answers, bool)

    def stop(self) -> int:
        """Ends the agent as a service manager does; its exit status."""
        return self._end_agent(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9 to the agent."""
        assert self._end_agent(signal.SIGKILL) == -signal.SIGKILL

    def torpor(self, *arguments: str, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs one command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "torpor", *arguments],
            env={**self.environment, **variables},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    def run(self, *argv: str, **facts: Any) -> dict[str, Any]:
        """Starts a detached session."""
        environment = {"PATH": os.environ["PATH"]}
        return self.client.create_session(list(argv), cwd="/", env=environment, **facts)

    def operate(self, ref: str, kind: str, *, if_idle: bool = False) -> dict[str, Any]:
        """Runs an operation to its end; its result."""
        *_, result = self.client.operation(ref, kind, if_idle=if_idle)
        return result

    def output(self, ref: str, stream: str = "out") -> str:
        """What a session has printed so far."""
        return b"".join(self.client.logs(ref, stream)).decode()

    def wait_for_output(self, ref: str, wanted: str) -> str:
        """Waits until a session has printed something."""
        return eventually(lambda: self.output(ref), lambda text: wanted in text)

    def wait_for_state(self, ref: str, *states: str) -> dict[str, Any]:
        """Waits until a session is in one of these states."""
        return eventually(lambda: self.client.session(ref), lambda session: session["state"] in states)

    def registry(self) -> contextlib.closing[Registry]:
        """The registry, opened beside the agent's own."""
        return contextlib.closing(Registry(self.paths.database))

    def keeper(self) -> contextlib.closing[KeeperClient]:
        """A connection to the keeper."""
        return contextlib.closing(KeeperClient(self.paths))

    def close(self) -> None:
        """Ends every process that was started here, and removes all files; a test that fails shows the logs."""
        for log in ("agent.log", "state/logs/keeper.log", "state/logs/workers.log"):
            if (self.home / log).exists():
                print(f"--- {log}\n{(self.home / log).read_text()}")
        if self.agent is not None and self.agent.poll() is None:
            self.kill()
        sessions: list[Session] = []
        if self.paths.database.exists():
            with self.registry() as registry:
                sessions = registry.sessions()
                workers = [operation.worker for operation in registry.open_operations()]
            for process in [*workers, *(session.init for session in sessions)]:
                kill(process)
        if self.paths.keeper_socket.exists():
            with contextlib.suppress(EngineError), contextlib.closing(ensure_keeper(self.paths)) as keeper:
                keeper.stop(force=True)
        for session in sessions:
            assert session.init is None or eventually(lambda init=session.init: not is_alive(init), bool)
        shutil.rmtree(self.home)

    def _answers(self) -> bool:
        assert self.agent is not None
        assert self.agent.poll() is None, self.log
        with contextlib.suppress(AgentUnreachable):
            return bool(self.client.node())
        return False

    def _end_agent(self, signum: int) -> int:
        assert self.agent is not None
        self.agent.send_signal(signum)
        return self.agent.wait(timeout=PATIENCE)


def eventually(look: Callable[[], T], wanted: Callable[[T], bool], patience: float = PATIENCE) -> T:
    """Looks until what is seen is as wanted; fails after a while with what was seen last."""
    deadline = time.monotonic() + patience
    while not wanted(seen := look()):
        assert time.monotonic() < deadline, f"still {seen!r} after {patience:.0f} s"
        time.sleep(0.02)
    return seen


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process runs."""
    return procfs.alive(process.pid, process.start_time, process.boot_id)


def kill(process: ProcessId | None) -> None:
    """kill -9, if it is still there."""
    if process is not None and is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def installations() -> Iterator[Callable[[], Installation]]:
    """Makes any number of installations, and ends them all."""
    made: list[Installation] = []

    def make() -> Installation:
        made.append(Installation())
        return made[-1]

    yield make
    for installation in made:
        installation.close()
