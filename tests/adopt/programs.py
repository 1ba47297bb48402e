"""A program started outside of Torpor, with its output in a file, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.installation import eventually
from tests.sessions.stage import Stage

from torpor.engine import procfs
from torpor.model import Launch, ProcessId, Session, State

PYTHON = "/usr/bin/python3"


class Program:
    """One such program; `stdin`, `stdout` are descriptors in place of nothing and the output file."""

    def __init__(
        self,
        folder: Path,
        argv: tuple[str, ...],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        own_session: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._log = folder / "output"
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log if stdout is None else stdout,
                cwd=folder,
                start_new_session=own_session,
                env={**os.environ, **(env or {})},
            )
        self.pid = self.process.pid

    @property
    def output(self) -> list[str]:
        """Lines printed so far."""
        return self._log.read_text().splitlines()

    def printed(self, line: str) -> None:
        """Waits until it has printed a line."""
        eventually(lambda: self.output, lambda lines: line in lines)

    def tree(self) -> list[ProcessId]:
        """It and everything below it."""
        boot = procfs.boot_id()
        return [ProcessId(*procfs.identify(pid), boot) for pid in procfs.tree(self.pid)]

    def close(self) -> None:
        """kill -9 to whatever still runs of it where it was started."""
        for process in self.tree() if self.process.poll() is None else ():
            procfs.kill(process)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def adopted(stage: Stage, program: Program) -> Session:
    """What the agent makes of a running program."""
    session_id = "s-" + secrets.token_hex(4)
    folder = stage.paths.session(session_id)
    folder.mkdir(mode=0o711)
    for name in ("exit", "out.log"):
        (folder / name).touch(0o600)
    process = ProcessId(*procfs.identify(program.pid), procfs.boot_id())
    stage.keeper.adopt(session_id, process.pid, process.start_time)
    return stage.registry.create_session(
        Session(
            id=session_id,
            name="adopted",
            state=State.RUNNING,
            uid=0,
            owner="root",
            node="here",
            created=time.time(),
            launch=Launch(tuple(procfs.arguments(program.pid)), str(program.folder), {}),
            caller=procfs.caller_facts(program.pid, os.getuid(), os.getgid()),
            init=process,
            outside=True,
        )
    )


@contextlib.contextmanager
def occupied(pid: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has this number on the node meanwhile.

    The number is free as soon as everything that had it as its job or session has been reaped.
    """

    def attempt() -> subprocess.Popen[bytes] | None:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1), encoding="ascii")
        occupant = subprocess.Popen(["sleep", "1000"])
        if occupant.pid == pid:
            return occupant
        occupant.kill()
        occupant.wait()
        time.sleep(0.1)
        return None

    occupant = eventually(attempt, lambda found: found is not None)
    assert occupant is not None
    try:
        yield occupant
    finally:
        occupant.kill()
        occupant.wait()
