"""A small client of a real JupyterLab: notebooks over REST, cells over the websocket, as the browser does it."""

from __future__ import annotations

import json
import secrets
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torpor.errors import TorporError

if TYPE_CHECKING:
    import websocket  # comes with JupyterLab, and is imported when there is one to talk to

ANSWER_TIMEOUT = 60.0  # seconds for a REST answer: it may start a kernel
Json = dict[str, Any]


@dataclass
class Answer:
    """What a cell did: its reply, what it printed, and when (seconds after it was sent)."""

    status: str = ""
    printed: str = ""
    first_output: float | None = None
    replied: float = 0.0
    seconds: float = 0.0
    error: str = ""
    notices: list[str] = field(default_factory=list)  # shown meanwhile and not printed by the cell


class Lab:
    """The REST side of a Jupyter server at `url` (ends with a slash). Raises TorporError when it refuses."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token

    def save_notebook(self, path: str, content: Json) -> None:
        """Writes a notebook file below the server's root."""
        self._request("PUT", f"api/contents/{path}", {"type": "notebook", "format": "json", "content": content})

    def read_cells(self, path: str) -> list[str]:
        """The source of each cell of a notebook file."""
        model = self._request("GET", f"api/contents/{path}?content=1")
        return [cell["source"] for cell in model["content"]["cells"]]

    def open_notebook(self, path: str) -> str:
        """Starts a kernel for a notebook, as opening it does; the kernel's id."""
        request = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        kernel_id: str = self._request("POST", "api/sessions", request)["kernel"]["id"]
        return kernel_id

    def kernel_state(self, kernel_id: str) -> str:
        """What the server believes of a kernel: starting, idle, busy, dead."""
        state: str = self._request("GET", f"api/kernels/{kernel_id}")["execution_state"]
        return state

    def shut_down(self, kernel_id: str) -> None:
        """Shuts a kernel down."""
        self._request("DELETE", f"api/kernels/{kernel_id}")

    def connect(self, kernel_id: str) -> KernelConnection:
        """Opens the websocket to a kernel's channels."""
        import websocket

        session = uuid4().hex
        url = f"{self.url.replace('http', 'ws', 1)}api/kernels/{kernel_id}/channels?session_id={session}"
        headers = [f"Authorization: token {self.token}"]
        try:
            socket = websocket.create_connection(url, timeout=ANSWER_TIMEOUT, header=headers)
        except (OSError, websocket.WebSocketException) as reason:
            raise TorporError(f"JupyterLab does not connect the notebook to its kernel: {reason}.") from reason
        return KernelConnection(socket, session)

    def _request(self, method: str, path: str, body: Json | None = None) -> Json:
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT) as response:
                answer: Json = json.loads(response.read() or b"{}")
                return answer
        except urllib.error.HTTPError as refusal:
            detail = refusal.read()[:500].decode(errors="replace")
            raise TorporError(f"JupyterLab answered {refusal.code} to {method} {path}: {detail}") from refusal
        except OSError as reason:
            raise TorporError(f"JupyterLab did not answer {method} {path}: {reason}.") from reason


class KernelConnection:
    """A notebook's websocket. As a context manager it is closed at the end."""

    def __init__(self, socket: websocket.WebSocket, session: str) -> None:
        self._socket = socket
        self._session = session

    def __enter__(self) -> KernelConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def run(self, code: str, timeout: float = 120.0) -> Answer:
        """Runs one cell and waits for its reply and its end. Raises TorporError when it fails or takes longer."""
        began = time.monotonic()
        sent = self._send(
            "execute_request", {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        )
        answer, idle = Answer(), False
        while not (idle and answer.status):
            message = self._receive(began + timeout)
            if message["parent_header"].get("msg_id") != sent:
                continue
            idle = _take(answer, message, time.monotonic() - began) or idle
        answer.seconds = time.monotonic() - began
        if answer.status != "ok":
            raise TorporError(f"A cell of the notebook failed: {answer.error or answer.status}.")
        return answer

    def _send(self, kind: str, content: Json) -> str:
        message_id = uuid4().hex
        header = {
            "msg_id": message_id,
            "msg_type": kind,
            "session": self._session,
            "username": "demo",
            "version": "5.3",
            "date": datetime.now(UTC).isoformat(),
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self._socket.send(json.dumps({**message, "buffers": []}))
        return message_id

    def _receive(self, deadline: float) -> Json:
        import websocket

        while True:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                frame = self._socket.recv()
            except websocket.WebSocketTimeoutException as silence:
                raise TorporError("A cell of the notebook was not answered in time.") from silence
            except websocket.WebSocketException as reason:
                raise TorporError(f"JupyterLab closed the notebook's websocket: {reason}.") from reason
            if isinstance(frame, str) and frame:
                message: Json = json.loads(frame)
                return message


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(24)


def server_command(root: Path) -> list[str]:
    """How to start a JupyterLab on a free port of this machine, for the notebooks below `root`; no browser."""
    options = {"ip": "127.0.0.1", "port": "0", "root_dir": str(root)}
    settings = [f"--ServerApp.{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *settings]


def find_server(runtime: Path, token: str) -> Lab | None:
    """The server that wrote its address into the folder `runtime`, once it does and answers."""
    for file in runtime.glob("jpserver-*.json"):
        try:
            facts = json.loads(file.read_text())
        except ValueError:
            return None  # it is writing it now
        lab = Lab(facts["url"], token)
        try:
            lab._request("GET", "api")
        except TorporError:
            return None
        return lab
    return None


def _take(answer: Answer, message: Json, after: float) -> bool:
    """Notes what a message says; True when it says that the kernel is done with the cell."""
    kind, content = message["header"]["msg_type"], message["content"]
    if kind == "execute_reply":
        answer.status, answer.replied = content["status"], after
    elif kind == "error":
        answer.error = f"{content['ename']}: {content['evalue']}"
    elif kind == "stream" and content["name"] == "stdout":
        answer.first_output = after if answer.first_output is None else answer.first_output
        answer.printed += content["text"]
    elif kind in ("display_data", "update_display_data"):
        answer.notices.append(content["data"].get("text/plain", ""))
    elif kind == "clear_output":
        answer.printed = ""
    return bool(kind == "status" and content["execution_state"] == "idle")
