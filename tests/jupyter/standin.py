"""A stand-in for the agent, for tests of the relay alone: kernels are plain processes, hibernation is SIGSTOP.

It speaks the agent's HTTP API as far as the relay uses it. Nothing is saved; what it shows is what passes between
clients, relay and kernel. The real agent is used in test_relay_with_agent.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socketserver
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torpor.errors import Conflict, TorporError


@dataclass
class StandInSession:
    """One kernel. `reports` are what the relay told of it, oldest first."""

    id: str
    process: subprocess.Popen[bytes]
    log: Path
    state: str = "running"
    version: int = 1
    lease: int = 1
    exit_status: int | None = None
    answered: int = 0
    quiesced: dict[str, Any] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    @property
    def socket_folders(self) -> list[Path]:
        """Where an inner half that was killed left the kernel's sockets; a real session has a /dev/shm of its own."""
        inner = Path(str(self.process.args[3])) if len(self.process.args) > 3 else Path()
        return [Path(inner.read_text().split("\n")[3]).parent] if inner.name == "inner" and inner.exists() else []

    def signal_all(self, signum: int) -> None:
        """Signals all processes of the session, as if it were frozen, thawed or ended."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(int(entry.name)) == self.process.pid:
                        os.kill(int(entry.name), signum)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("id", "state", "version", "lease", "exit_status")}


class StandInAgent:
    """Serves until `stop`. `resume_gate` holds a resume while it is cleared; `resume_error` makes it fail."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.sessions: dict[str, StandInSession] = {}
        self.changed = threading.Condition()
        self.resume_gate = threading.Event()
        self.resume_gate.set()
        self.resume_error: TorporError | None = None
        self.progress: list[dict[str, Any]] = []
        self._server: _Server | None = None

    @property
    def socket(self) -> Path:
        return self.home / "run" / "agent.sock"

    def start(self) -> None:
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._server = _Server(str(self.socket), _handler_for(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def go_away(self) -> None:
        """The agent's process is gone; its sessions run on."""
        assert self._server is not None
        self.socket.unlink()
        self._server.shutdown()
        self._server.server_close()

    def stop(self) -> None:
        for session in self.sessions.values():
            session.signal_all(signal.SIGKILL)
            session.process.wait()
            for folder in session.socket_folders:
                shutil.rmtree(folder, ignore_errors=True)
        self.go_away()

    @property
    def only(self) -> StandInSession:
        (session,) = self.sessions.values()
        return session

    @property
    def newest(self) -> StandInSession:
        return list(self.sessions.values())[-1]

    def hibernate(self, session: StandInSession, *, if_idle: bool = False) -> None:
        """Asks the relay, then stops the process. Raises Conflict with the relay's sentence when it says no."""
        with self.changed:
            self._set(session, "hibernating")
            version = session.version
            assert self.changed.wait_for(lambda: session.quiesced.get("version") == version, 15), "relay is silent"
            if not session.quiesced["ok"] and (if_idle or not session.quiesced["lossless"]):
                self._set(session, "running")
                raise Conflict(session.quiesced["reason"])
            session.signal_all(signal.SIGSTOP)
            self._set(session, "hibernated")

    def wait_for(self, session: StandInSession, state: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: session.state == state, 30), f"{session.state}, not {state}"

    def create(self, request: dict[str, Any]) -> StandInSession:
        log = self.home / f"{len(self.sessions)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                request["argv"],
                cwd=request["cwd"],
                env=request["env"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        session = StandInSession(f"s{len(self.sessions)}", process, log)
        with self.changed:
            self.sessions[session.id] = session
        threading.Thread(target=self._wait, args=(session,), daemon=True).start()
        return session

    def resume(self, session: StandInSession) -> None:
        with self.changed:
            if session.state != "hibernated":
                raise Conflict(f"The session is {session.state}.")
            self._set(session, "resuming")
        self.resume_gate.wait()
        with self.changed:
            if self.resume_error:
                self._set(session, "hibernated")
                raise self.resume_error
            session.signal_all(signal.SIGCONT)
            session.lease += 1
            self._set(session, "running")

    def end(self, session: StandInSession) -> None:
        session.signal_all(signal.SIGTERM)
        session.signal_all(signal.SIGCONT)
        self.wait_for(session, "ended")

    def _wait(self, session: StandInSession) -> None:
        status = session.process.wait()
        with self.changed:
            session.exit_status = status if status >= 0 else 128 - status
            ended = status == 0 or "end" in session.calls
            self._set(session, "ended" if ended else "failed")

    def _set(self, session: StandInSession, state: str) -> None:
        session.state = state
        session.version += 1
        self.changed.notify_all()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A relay that was killed does not wait for its answer."""


def _handler_for(stand_in: StandInAgent) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        agent = stand_in

    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    agent: StandInAgent

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        words = parts.path.split("/")[3:]
        session = self.agent.sessions.get(words[0])
        if session is None:
            return self._answer({"code": "not_found", "message": "No such session."}, 404)
        if words[1:] == ["logs"]:
            return self._send(session.log.read_bytes(), 200)
        if words[1:] == ["watch"]:
            query = parse_qs(parts.query)
            self._watch(session, int(query["version"][0]), float(query["timeout"][0]))
        return self._answer(session.as_json())

    def do_POST(self) -> None:
        body = self._body()
        words = urlsplit(self.path).path.split("/")[3:]
        if not words:
            return self._answer(self.agent.create(body).as_json(), 201)
        session = self.agent.sessions[words[0]]
        session.calls.append(words[1])
        match words[1]:
            case "resume":
                return self._operate(self.agent.resume, session)
            case "hibernate":
                if_idle = urlsplit(self.path).query == "if_idle=1"
                return self._operate(partial(self.agent.hibernate, if_idle=if_idle), session)
            case "quiesced":
                self._note(session, quiesced=body)
            case "answered":
                self._note(session, answered=body["version"])
            case "signal":
                os.killpg(session.process.pid, body["signal"])
            case "end":
                self.agent.end(session)
        return self._answer({})

    def do_DELETE(self) -> None:
        session = self.agent.sessions.pop(urlsplit(self.path).path.split("/")[3])
        self._answer({"id": session.id, "bytes_freed": 0})

    def do_PUT(self) -> None:
        session = self.agent.sessions[urlsplit(self.path).path.split("/")[3]]
        self._note(session, reports=[*session.reports, self._body()])
        self._answer({})

    def _note(self, session: StandInSession, **facts: Any) -> None:
        with self.agent.changed:
            for name, value in facts.items():
                setattr(session, name, value)
            self.agent.changed.notify_all()

    def _watch(self, session: StandInSession, version: int, timeout: float) -> None:
        server = self.agent._server
        deadline = time.monotonic() + timeout
        with self.agent.changed:
            while session.version <= version and time.monotonic() < deadline:
                self.agent.changed.wait(0.1)
                if server is not self.agent._server or not self.agent.socket.exists():
                    raise BrokenPipeError("the agent that was asked is gone")

    def _operate(self, act: Any, session: StandInSession) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in self.agent.progress:
            self._line({"event": "progress", **event})
        try:
            act(session)
            self._line({"event": "result"})
        except TorporError as error:
            self._line({"event": "error", "error": error.as_dict()})
        self.close_connection = True

    def _line(self, event: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()

    def _body(self) -> Any:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return json.loads(content) if content else {}

    def _answer(self, body: Any, status: int = 200) -> None:
        self._send(json.dumps(body).encode(), status)

    def _send(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
