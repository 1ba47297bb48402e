"""A real keeper in a folder of its own, with what the tests ask of it again and again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torpor.engine import keeper_client, procfs
from torpor.engine.keeper_client import Events, KeeperClient, Launched, ensure_keeper
from torpor.model import Caller, InputOutput, Launch
from torpor.paths import Paths

PYTHON = "/usr/bin/python3"
PATIENCE = 30.0
USER = 12345  # a user id without an account: nothing but its number is needed
T = TypeVar("T")


class Stage:
    """One keeper; sessions are named a, b, c…"""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="torpor-"))
        self.home.chmod(0o711)
        self.paths = Paths(run=self.home / "run", state=self.home / "state", config=self.home / "config.toml")
        self.keeper: KeeperClient = ensure_keeper(self.paths)
        self.launched: dict[str, Launched] = {}

    def close(self) -> None:
        for made in self.launched.values():
            kill(made.pid, made.start_time)
        self.keeper.close()
        with contextlib.closing(ensure_keeper(self.paths)) as keeper:
            for session in keeper.sessions():
                kill(session.pid, session.start_time)
            pidfd = os.pidfd_open(keeper.pid())
            keeper.stop(force=True)
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)
        shutil.rmtree(self.home)

    def folder(self, session: str) -> Path:
        return self.paths.session(session)

    def launch(
        self,
        *argv: str,
        session: str = "a",
        io: InputOutput = InputOutput.DETACHED,
        env: dict[str, str] | None = None,
        cwd: str = "/",
        caller: Caller | None = None,
        **facts: Any,
    ) -> Launched:
        launch = Launch(argv=argv, cwd=cwd, env=env or {"PATH": os.environ["PATH"]}, io=io, **facts)
        made = self.keeper.launch(session, self.folder(session), launch, caller or me())
        self.launched[session] = made
        return made

    def python(self, source: str, **facts: Any) -> Launched:
        return self.launch(PYTHON, "-I", "-S", "-c", source, **facts)

    def output(self, session: str = "a", name: str = "out.log") -> str:
        return (self.folder(session) / name).read_text()

    def wait_for_output(self, text: str, session: str = "a", name: str = "out.log") -> str:
        return eventually(lambda: self.output(session, name), lambda output: text in output)

    def wait_for_exit(self, session: str = "a") -> int | None:
        """The status that the keeper announces."""
        events = Events(self.paths)
        try:
            for event in events:
                if event == {"event": "exit", "session": session, "status": event.get("status")}:
                    status: int | None = event["status"]
                    return status
        finally:
            events.close()
        raise AssertionError("The keeper ended.")

    def facts(self, source: str, **facts: Any) -> dict[str, Any]:
        """What a program that prints one line of JSON says from inside a session that ends well."""
        self.python(source, **facts)
        assert self.wait_for_exit() == 0, self.output()
        said: dict[str, Any] = json.loads(self.output())
        return said

    def kill_keeper(self) -> None:
        """kill -9 to the keeper; nothing is started in its place."""
        pid = self.keeper.pid()
        with open_pidfd(pid) as pidfd:
            os.kill(pid, signal.SIGKILL)
            assert select.select([pidfd], [], [], PATIENCE)[0]
        self.keeper.close()

    def start_keeper(self) -> None:
        self.keeper = ensure_keeper(self.paths)

    def attach(self, session: str = "a", position: int | None = 0) -> Attached:
        return Attached(self.paths.attach_socket, session, position)


class Attached:
    """A client of a terminal."""

    def __init__(self, path: Path, session: str, position: int | None) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self.socket.sendall(json.dumps({"session": session, "from": position}).encode() + b"\n")
        self.stream = self.socket.makefile("rb")
        self.answer = json.loads(self.stream.readline())
        self.seen = b""
        self.status: str | None = None

    def type(self, data: bytes) -> None:
        self.send(b"d", data)

    def resize(self, rows: int, columns: int) -> None:
        self.send(b"r", b"%d %d" % (rows, columns))

    def send(self, kind: bytes, payload: bytes) -> None:
        self.socket.sendall(struct.pack(">cI", kind, len(payload)) + payload)

    def read_until(self, wanted: bytes) -> bytes:
        """Everything seen so far, once `wanted` is in what came since the last call."""
        while wanted not in self.seen:
            assert self.read_frame(), self.seen
        seen, self.seen = self.seen, b""
        return seen

    def read_to_end(self) -> bytes:
        while self.read_frame():
            pass
        return self.seen

    def read_frame(self) -> bool:
        header = self.stream.read(5)
        if len(header) < 5:
            return False
        kind, length = struct.unpack(">cI", header)
        payload = self.stream.read(length)
        if kind == b"d":
            self.seen += payload
        else:
            assert kind == b"x"
            self.status = payload.decode()
        return True

    def close(self) -> None:
        self.stream.close()
        self.socket.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def me() -> Caller:
    return procfs.caller_facts(os.getpid(), os.getuid(), os.getgid())


def user(**facts: Any) -> Caller:
    """Another user, with the rest like ours."""
    return msgspec.structs.replace(me(), **{"uid": USER, "gid": USER, "groups": (USER + 1, USER + 2), **facts})


def kill(pid: int, start_time: int) -> None:
    if procfs.alive(pid, start_time, procfs.boot_id()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def open_pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def eventually(look: Callable[[], T], wanted: Callable[[T], bool] = bool) -> T:
    """What `look` sees as soon as it is as wanted."""
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = look()
        if wanted(seen):
            return seen
        assert time.monotonic() < deadline, f"It did not happen; last seen: {seen!r}"
        time.sleep(0.02)


def exit_status(stage: Stage, session: str = "a") -> int | None:
    return keeper_client.exit_status(stage.folder(session))


def in_foreground(init: int, name: str) -> bool:
    """Whether the command of this name, in the session of `init`, has the terminal and waits for input."""
    for pid in procfs.tree(init):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if Path(f"/proc/{pid}/comm").read_text().strip() == name:
            return fields[0] == "S" and fields[2] == fields[5]
    return False
