"""A Torpor without its agent: registry, store and a real keeper; workers are started as the agent starts them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from torpor.engine import procfs
from torpor.engine.keeper_client import KeeperClient, ensure_keeper
from torpor.model import (
    Caller,
    InputOutput,
    Launch,
    Operation,
    OperationKind,
    ProcessId,
    Session,
    State,
)
from torpor.paths import Paths, from_environment
from torpor.sessions import planner, recovery
from torpor.sessions.executor import PAUSE_AFTER
from torpor.sessions.registry import Registry
from torpor.store import Store

PYTHON = "/usr/bin/python3"
PATIENCE = 60.0
T = TypeVar("T")


class Stage:
    """One installation in a temporary folder."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="torpor-"))
        self.home.chmod(0o711)
        self.paths: Paths = from_environment({"TORPOR_HOME": str(self.home)})
        for folder in (self.paths.run, self.paths.state, self.paths.state / "sessions", self.paths.state / "logs"):
            folder.mkdir(parents=True, mode=0o755)
        self.paths.site_key.parent.mkdir(mode=0o700)
        self.paths.site_key.write_bytes(secrets.token_bytes(32))
        Store.open(self.paths.store, self.paths.site_key.read_bytes(), create=True).close()
        self.registry = Registry(self.paths.database)
        self.keeper: KeeperClient = ensure_keeper(self.paths)

    def close(self) -> None:
        """Ends everything that this stage started."""
        for session in self.registry.sessions():
            if session.init is not None and procfs.alive(*_fields(session.init)):
                os.kill(session.init.pid, signal.SIGKILL)
        self.keeper.close()
        with contextlib.closing(ensure_keeper(self.paths)) as keeper:
            keeper.stop(force=True)
        self.registry.close()
        shutil.rmtree(self.home)

    def start(
        self,
        source: str,
        *arguments: str,
        io: InputOutput = InputOutput.DETACHED,
        name: str = "one",
        uid: int = 0,
    ) -> Session:
        """A session that runs Python source with the system's own Python, as `uid`."""
        session_id = "s-" + secrets.token_hex(4)
        launch = Launch(
            argv=(PYTHON, "-I", "-S", "-c", source, *arguments), cwd="/", env={"PATH": os.environ["PATH"]}, io=io
        )
        here: Caller = procfs.caller_facts(os.getpid(), os.getuid(), os.getgid())
        caller = here if uid == 0 else msgspec.structs.replace(here, uid=uid, gid=uid, groups=(uid, uid + 1))
        made = self.keeper.launch(session_id, self.paths.session(session_id), launch, caller)
        return self.registry.create_session(
            Session(
                id=session_id,
                name=name,
                state=State.RUNNING,
                uid=uid,
                owner=str(uid),
                node="here",
                created=time.time(),
                launch=launch,
                caller=caller,
                init=ProcessId(made.pid, made.start_time, procfs.boot_id()),
                terminal=made.terminal,
            )
        )

    def begin(
        self,
        session: Session,
        kind: OperationKind,
        *,
        pause_after: str | None = None,
        program: Sequence[str] = ("-m", "torpor.sessions.worker"),
        **env: str,
    ) -> Worker:
        """Plans an operation and starts its worker; `program` is what Python runs as that."""
        operation = self.registry.begin_operation(session.id, kind, planner.steps(kind, session))
        return Worker(self, operation, pause_after, program, env)

    def run(self, session: Session, kind: OperationKind) -> Operation:
        """A whole operation, which must be completed."""
        worker = self.begin(session, kind)
        worker.wait()
        operation = self.registry.operation(worker.operation.id)
        assert operation.outcome == "completed", operation.error
        return operation

    def kill_keeper(self) -> None:
        """kill -9 to the keeper; a new one takes over as the agent would make it."""
        held = {one.id: self.keeper.take_fds(one.id) for one in self.registry.sessions()}
        pid = self.keeper.pid()
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)
        self.keeper.close()
        self.keeper = ensure_keeper(self.paths)
        for session in self.registry.sessions():
            if session.init is not None and procfs.alive(*_fields(session.init)):
                self.keeper.adopt(session.id, session.init.pid, session.init.start_time, held[session.id])
            for descriptor in held[session.id].values():
                os.close(descriptor)

    def recover(self, operation: Operation) -> Session:
        """What the agent does when a worker died."""
        return recovery.recover(self.paths, self.registry, operation.id)

    def session(self, session: Session) -> Session:
        """The session as the registry has it now."""
        return self.registry.session(session.id)

    def output(self, session: Session) -> list[str]:
        """Lines that the session has printed so far."""
        return (self.paths.session(session.id) / "out.log").read_text().splitlines()

    def wait_for_output(self, session: Session, wanted: Callable[[list[str]], bool]) -> list[str]:
        """Waits until the session's lines are as wanted."""
        return eventually(lambda: self.output(session), wanted)


class Worker:
    """A worker started through the keeper."""

    def __init__(
        self, stage: Stage, operation: Operation, pause_after: str | None, program: Sequence[str], env: dict[str, str]
    ) -> None:
        self.operation = operation
        self._read, write = os.pipe()
        environment = {**os.environ, "TORPOR_HOME": str(stage.home), **env}
        if pause_after:
            environment[PAUSE_AFTER] = f"{operation.kind}:{pause_after}"
        null = os.open("/dev/null", os.O_RDONLY)
        log = os.open(stage.home / "workers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        argv = [sys.executable, *program, operation.id]
        self.pid, self.start_time = stage.keeper.spawn(operation.id, argv, environment, null, write, log)
        self.pidfd = os.pidfd_open(self.pid)
        for descriptor in (null, log, write):
            os.close(descriptor)

    def wait(self) -> list[dict[str, object]]:
        """Waits for its end; the lines that it printed."""
        lines: list[dict[str, object]] = []
        with open(self._read) as output:
            lines += [json.loads(line) for line in output]
        assert select.select([self.pidfd], [], [], PATIENCE)[0]
        os.close(self.pidfd)
        return lines

    def wait_for_pause(self) -> None:
        """Waits until it says that it stopped after its step."""
        seen = b""
        while b'"paused"' not in seen:
            ready, _, _ = select.select([self._read], [], [], PATIENCE)
            assert ready, "the worker did not come to its step"
            piece = os.read(self._read, 65536)
            assert piece, "the worker ended before its step"
            seen += piece

    def go_on(self) -> None:
        """Ends the pause."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        assert select.select([self.pidfd], [], [], PATIENCE)[0]
        os.close(self.pidfd)
        os.close(self._read)


def eventually(look: Callable[[], T], wanted: Callable[[T], bool]) -> T:
    """Looks until what is seen is as wanted; fails after a minute."""
    deadline = time.monotonic() + PATIENCE
    while not wanted(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)
    return seen


def a_stage() -> Iterator[Stage]:
    stage = Stage()
    try:
        yield stage
    finally:
        stage.close()


def _fields(process: ProcessId) -> tuple[int, int, str]:
    return process.pid, process.start_time, process.boot_id
