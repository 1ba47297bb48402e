"""The keeper as others see it: start it when there is none, ask it, hear its events, attach to terminals."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torpor.engine import keeper_session, keeper_wire
from torpor.errors import EngineError, SetupError
from torpor.model import Caller, Launch
from torpor.paths import Paths

START_SECONDS = 20.0
REPLY_SECONDS = 90.0
_POLL_SECONDS = 0.02
_SOCKET_PATH_LIMIT = 107
_PROBE = "import ctypes, fcntl, json, os, resource, signal, sys, termios; sys.exit(sys.version_info < (3, 9))"


@dataclass(frozen=True)
class Launched:
    """A session's first process; `terminal` is the path of its side of the pty; `notes` are sentences for the owner."""

    pid: int
    start_time: int
    terminal: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Running:
    """A process that the keeper watches: a session's first one (`name` is the session's id) or a worker."""

    name: str
    pid: int
    start_time: int


class KeeperClient:
    """One connection to the keeper; may be used from several threads. Every method raises EngineError when the keeper
    refuses or is gone."""

    def __init__(self, paths: Paths) -> None:
        self._sock = connect(paths.keeper_socket)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def checked(self) -> KeeperClient:
        """This connection, once the keeper has answered on it: one that is about to end accepts connections too."""
        try:
            self.pid()
        except EngineError:
            self.close()
            raise
        return self

    def pid(self) -> int:
        """The keeper's own pid."""
        return int(self.request("hello")["pid"])

    def sessions(self) -> list[Running]:
        """Sessions whose first process the keeper watches."""
        found = self.request("hello")["sessions"]
        return [Running(item["session"], item["pid"], item["start_time"]) for item in found]

    def workers(self) -> list[Running]:
        """Workers that run."""
        return [Running(item["name"], item["pid"], item["start_time"]) for item in self.request("hello")["workers"]]

    def launch(self, session: str, folder: Path, launch: Launch, caller: Caller) -> Launched:
        """Start a session; returns when its first process is ready and has started the main command."""
        spec = json.dumps({"launch": msgspec.to_builtins(launch), "caller": msgspec.to_builtins(caller)})
        memory = keeper_wire.memory_file(spec.encode())
        try:
            answer = self.request("launch", [memory], session=session, dir=str(folder))
        finally:
            os.close(memory)
        return Launched(answer["pid"], answer["start_time"], answer["terminal"], tuple(answer["notes"]))

    def spawn(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], stdin: int, stdout: int, stderr: int
    ) -> tuple[int, int]:
        """Start a worker as the keeper's child, `argv[0]` a path; returns `(pid, start_time)`."""
        answer = self.request("spawn", [stdin, stdout, stderr], name=name, argv=list(argv), env=dict(env))
        return answer["pid"], answer["start_time"]

    def adopt(
        self, session: str, pid: int, start_time: int, given: Mapping[str, int] | None = None, **facts: Any
    ) -> None:
        """Watch this process as the session's first, after a resume or a restart of the keeper. Ends `away`.

        `given` gives back descriptors from `take_fds`; `facts` may name `dir` and `uid`, else the session's own folder
        and its owner."""
        given = given or {}
        self.request(
            "adopt", list(given.values()), session=session, pid=pid, start_time=start_time, names=list(given), **facts
        )

    def forget(self, session: str) -> None:
        """Hold nothing of this session any more; a session unknown is forgotten already."""
        self.request("forget", session=session)

    def hold_terminal(self, session: str, rows: int, columns: int, **facts: Any) -> str:
        """Path of the session's side of the terminal held for it; makes one when none is held."""
        return str(self.request("hold_terminal", session=session, rows=rows, columns=columns, **facts)["terminal"])

    def take_fds(self, session: str) -> dict[str, int]:
        """Copies, the caller's to close, of what the keeper holds.

        `terminal` is the pty's master, `stdin` the read end of the pipe; those that the session has."""
        with self._lock:
            answer, fds = self._exchange("take_fds", {"session": session}, [])
        return dict(zip(answer["names"], fds, strict=True))

    def give_fds(self, session: str, given: Mapping[str, int], **facts: Any) -> None:
        """Give copies from `take_fds` to a new keeper while the session is away; `adopt` does it for a running one."""
        self.request("give_fds", list(given.values()), session=session, names=list(given), **facts)

    def signal(self, session: str, signum: int) -> None:
        """Signal the session's first process, which passes it on to the main command's process group."""
        self.request("signal", session=session, signum=signum)

    def kill(self, session: str) -> None:
        """SIGKILL to the session's first process: every process of the session ends."""
        self.request("kill", session=session)

    def resize(self, session: str, rows: int, columns: int) -> None:
        """Set the terminal's size in characters."""
        self.request("resize", session=session, rows=rows, columns=columns)

    def away(self, session: str, away: bool) -> None:
        """Say that the session is being or has been hibernated (its process's end is no exit), or is back."""
        self.request("away", session=session, away=away)

    def close_stdin(self, session: str) -> None:
        """Nobody will write to the session's standard input: it reads the end."""
        self.request("close_stdin", session=session)

    def stop(self, *, force: bool = False) -> None:
        """End the keeper; refused while it holds sessions or workers, unless forced (they go on without it)."""
        self.request("stop", force=force)

    def request(self, do: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """One request and its reply; descriptors in the reply are closed."""
        with self._lock:
            answer, received = self._exchange(do, arguments, fds)
        keeper_wire.close_all(received)
        return answer

    def _exchange(self, do: str, arguments: dict[str, Any], fds: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        try:
            keeper_wire.send(self._sock, {"do": do, **arguments}, fds)
            received = keeper_wire.receive(self._sock)
        except (OSError, ValueError) as error:
            raise EngineError(f"The keeper did not answer {do}: {error}.") from error
        if received is None:
            raise EngineError(f"The keeper ended before it answered {do}.")
        answer, given = received
        if not answer.get("ok"):
            keeper_wire.close_all(given)
            raise EngineError(str(answer.get("error")))
        return answer, given


class Events:
    """The keeper's events, on a connection of their own: `exit` of a session, `input` for an away one, `worker_exit`.

    What happened before and was not forgotten (ended sessions, waiting input) comes first.
    """

    def __init__(self, paths: Paths) -> None:
        self._sock = connect(paths.keeper_socket)
        self._sock.settimeout(None)
        keeper_wire.send(self._sock, {"do": "subscribe"})
        received = keeper_wire.receive(self._sock)
        if received is None or not received[0].get("ok"):
            raise EngineError("The keeper refused to tell its events.")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Waits for each; ends when the keeper does, or when `close` is called."""
        while True:
            try:
                received = keeper_wire.receive(self._sock)
            except OSError:
                return
            if received is None:
                return
            yield received[0]

    def fileno(self) -> int:
        """For those who wait on several things."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection, also while another thread waits for the next event."""
        with contextlib.suppress(OSError):  # the keeper may have gone first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def ensure_keeper(paths: Paths) -> KeeperClient:
    """A connection to this installation's keeper, which is started when none runs; any number may call this at once.

    Raises EngineError when it does not start or does not answer, SetupError when its socket's path is too long.
    """
    for path in (paths.keeper_socket, paths.attach_socket):
        if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
            raise SetupError(f"The path {path} is too long for a socket.", hint="Choose a shorter TORPOR_HOME.")
    paths.run.mkdir(parents=True, exist_ok=True)
    paths.state.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return KeeperClient(paths).checked()
        except EngineError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"The keeper of {paths.run} does not answer.", hint=f"See {log_path(paths)}."
                ) from error
        if not start_if_none(paths):
            time.sleep(_POLL_SECONDS)  # another starter is at work


def start_if_none(paths: Paths) -> bool:
    """Start a keeper if no process holds the lock of this installation; says whether it did. Raises EngineError."""
    lock = os.open(paths.run / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        start(paths, lock)
        return True
    finally:
        os.close(lock)


def start(paths: Paths, lock: int) -> None:
    """Start a keeper that inherits the lock, and wait until it serves."""
    ready, given = os.pipe2(os.O_CLOEXEC)
    places = [paths.keeper_socket, paths.attach_socket, paths.session("x").parent]
    command = [sys.executable, "-m", "torpor.engine.keeper", *map(str, places), session_python(), str(given), str(lock)]
    package = str(Path(__file__).resolve().parents[2])
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": package,
    }
    paths.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(ready, "rb") as answer:
        try:
            with open(log_path(paths), "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    cwd="/",
                    pass_fds=(given, lock),
                    check=False,
                    timeout=START_SECONDS,
                )
        finally:
            os.close(given)
        if answer.read() != b"ready":
            raise EngineError("The keeper did not start.", hint=f"See {log_path(paths)}.")


def session_python() -> str:
    """Interpreter of launcher and init: the system's, which every user can read, else our own."""
    system = "/usr/bin/python3"
    if not os.access(system, os.X_OK):
        return sys.executable
    probed = subprocess.run([system, "-I", "-S", "-c", _PROBE], stderr=subprocess.DEVNULL, check=False)
    return system if probed.returncode == 0 else sys.executable


def connect(path: Path) -> socket.socket:
    """A connection to the control socket. Raises EngineError when no keeper answers."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(REPLY_SECONDS)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise EngineError(f"No keeper answers at {path}: {error.strerror}.") from error
    return sock


def exit_status(folder: Path) -> int | None:
    """Exit status (128 + signal when killed) that the session left in its folder; None when it left none."""
    return keeper_session.recorded_status(str(folder))


def clear_exit_status(folder: Path) -> None:
    """Empty the recorded status, before a session that had ended is brought back from a checkpoint. Raises OSError."""
    keeper_session.clear_status(str(folder))


def open_stdin(attach_socket: Path, session: str) -> int:
    """Write end of a STREAMS session's standard input, once and for its owner; closing it is the end of input.

    Until somebody has taken it, it is the keeper's, and the keeper's death would be the end of input."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(REPLY_SECONDS)
        try:
            sock.connect(str(attach_socket))
            sock.sendall(json.dumps({"session": session, "want": "stdin"}).encode() + b"\n")
            line, fds, _ = keeper_wire.receive_with_descriptors(sock, 4096)
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            raise EngineError(f"The session's standard input is not to be had: {error}.") from error
    if not answer.get("ok") or not fds:
        raise EngineError(str(answer.get("error")))
    return fds[0]


def log_path(paths: Paths) -> Path:
    """Where the keeper writes what goes wrong."""
    return paths.logs / "keeper.log"
