"""What both kinds of foreground share: the session's end, whoever tells it, and signals on their way to it."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from torpor.cli.output import show_error
from torpor.client import Client
from torpor.errors import AgentUnreachable, NotFound, TorporError

OVER = ("ended", "failed")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
RETRY = 0.5  # seconds between attempts to reach an agent that is being restarted
WATCH = 60.0  # seconds of one watch


class End:
    """How the session ended: its exit file at once, or else what the agent says, which may be away for a while."""

    def __init__(self, client: Client, session: dict[str, Any]) -> None:
        self._client = client
        self._id: str = session["id"]
        self._file = Path(session["folder"]) / "exit"
        self._final: dict[str, Any] | None = None
        self._failure: TorporError | None = None
        self._known = threading.Event()
        threading.Thread(target=self._watch, args=(session["version"],), daemon=True).start()

    def status(self) -> int | None:
        """The exit status once it is known, else None. Raises what went wrong when it will never be known."""
        if self._failure is not None:
            raise self._failure
        text = self._file.read_text() if self._file.exists() else ""
        if text.isdigit():
            return int(text) & 0xFF
        if self._final is None:
            return None
        status: int | None = self._final["exit_status"]
        if status is None:
            raise TorporError(f"The session {self._final['name']} ended, and its exit status is not known.")
        return status

    def wait(self, timeout: float) -> None:
        """Waits until the agent has told the end, or for `timeout` seconds."""
        self._known.wait(timeout)

    def _watch(self, version: int) -> None:
        while not self._known.is_set():
            try:
                session = self._client.watch(self._id, version, WATCH)
            except AgentUnreachable:
                time.sleep(RETRY)  # it will be back: sessions run on without it
                continue
            except TorporError as error:
                self._failure = _removed(error)
                self._known.set()
                return
            version = session["version"]
            if session["state"] in OVER:
                self._final = session
                self._known.set()


class Signals:
    """Signals of this process, taken so that they can be passed on by the main loop."""

    def __init__(self) -> None:
        self._taken: deque[int] = deque()
        self._before = {number: signal.signal(number, self._take) for number in FORWARDED}

    def pass_on(self, client: Client, session_id: str) -> None:
        """Sends what came to the session. One that is away cannot take it, which is told; one that ended need not."""
        while self._taken:
            try:
                client.signal(session_id, self._taken.popleft())
            except TorporError as error:
                if error.hint:
                    show_error(error, as_json=False)

    def restore(self) -> None:
        """Gives the signals their former meaning."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: Any) -> None:
        self._taken.append(number)


def attach(client: Client, greeting: dict[str, Any]) -> tuple[socket.socket, dict[str, Any], bytes, list[int]]:
    """Connects to the keeper: connection, its answer, what came behind it, descriptors. Raises OSError, TorporError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(client.paths.attach_socket))
        connection.sendall(json.dumps(greeting).encode() + b"\n")
        received, descriptors = b"", []
        while b"\n" not in received:
            data, came, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            if not data:
                raise ConnectionResetError("The keeper closed the connection.")
            received += data
            descriptors += came
    except OSError:
        connection.close()
        raise
    line, _, rest = received.partition(b"\n")
    answer: dict[str, Any] = json.loads(line)
    if not answer.get("ok"):
        connection.close()
        raise TorporError(f"The session cannot be attached to: {answer.get('error')}")
    return connection, answer, rest, descriptors


def _removed(error: TorporError) -> TorporError:
    return TorporError("The session was removed.") if isinstance(error, NotFound) else error
