"""Programs that people use, none of which knows of Torpor: nbclient, jupyter console, a Jupyter server."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import nbformat
import pexpect
import pytest
import websocket
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from tests.installation import eventually
from tests.jupyter.standin import StandInAgent

PATIENCE = 60


@pytest.mark.usefixtures("torpor_by_default")
def test_nbclient_runs_a_notebook_across_a_sleep(agent: StandInAgent) -> None:
    cells = ["x = 20", "x += 1\nprint(x)", "x * 2", "raise ValueError('on purpose')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, kernel_name="python3", timeout=PATIENCE, allow_errors=True)
    with client.setup_kernel():
        client.execute_cell(notebook.cells[0], 0)
        agent.hibernate(agent.only)
        agent.resume_gate.clear()
        waiting = threading.Thread(target=_open_after_notice, args=(agent, notebook.cells[1]))
        waiting.start()
        client.execute_cell(notebook.cells[1], 1)
        waiting.join()
        for number in (2, 3):
            agent.hibernate(agent.only)
            client.execute_cell(notebook.cells[number], number)
    outputs = [[output["output_type"] for output in cell.outputs] for cell in notebook.cells]
    assert outputs == [[], ["stream"], ["execute_result"], ["error"]]
    assert notebook.cells[1].outputs[0]["text"] == "21\n"
    assert notebook.cells[2].outputs[0]["data"]["text/plain"] == "42"
    agent.wait_for(agent.only, "ended")


@pytest.mark.usefixtures("torpor_by_default")
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_nbclient_notices_a_kernel_that_dies(agent: StandInAgent, transport: str) -> None:
    dying = nbformat.v4.new_code_cell("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    notebook = nbformat.v4.new_notebook(cells=[dying])
    client = NotebookClient(notebook, kernel_name="python3", timeout=PATIENCE, allow_errors=True)
    client.create_kernel_manager().kernel_spec.metadata["torpor"] = {"transport": transport}
    with pytest.raises(DeadKernelError):
        client.execute()
    assert dying.outputs == []


@pytest.mark.usefixtures("torpor_by_default")
def test_jupyter_console(agent: StandInAgent) -> None:
    arguments = ["-m", "jupyter_console", "--kernel", "python3", "--simple-prompt"]
    environment = {**os.environ, "JUPYTER_CONSOLE_TEST": "1", "TERM": "dumb", "NO_COLOR": "1"}
    console = pexpect.spawn(sys.executable, arguments, env=environment, encoding="utf-8", timeout=PATIENCE)
    try:
        console.expect(r"In \[1\]")
        console.sendline("y = 6 * 7")
        console.expect(r"In \[2\]")
        eventually(lambda: agent.only.reports[-1]["execution_state"], "idle".__eq__)
        agent.hibernate(agent.only)
        console.sendline("y")
        console.expect(r"Out\[2\].*42")
        console.expect(r"In \[3\]")
        console.sendline("print('hello ' + input('who? '))")
        console.expect(r"who\? ")
        console.sendline("Ada")
        console.expect("hello Ada")
        console.expect(r"In \[4\]")
        console.sendline("exit")
        console.expect(pexpect.EOF)
    finally:
        console.close(force=True)
    agent.wait_for(agent.only, "ended")


def _open_after_notice(agent: StandInAgent, cell: Any) -> None:
    """Lets the resume go on once the waiting cell has said in its outputs that it waits."""
    try:
        eventually(lambda: list(cell.outputs), bool)
    finally:
        agent.resume_gate.set()


class Server:
    """A Jupyter server, and one websocket to one of its kernels."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token
        self._sockets: list[websocket.WebSocket] = []

    def request(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"token {self._token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}api/{path}", content, headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.loads(response.read() or b"null")

    def answers(self) -> bool:
        try:
            return bool(self.request("GET", "status"))
        except urllib.error.URLError:
            return False

    def connect(self, kernel: str) -> websocket.WebSocket:
        url = f"{self._url.replace('http', 'ws', 1)}api/kernels/{kernel}/channels?session_id={uuid4().hex}"
        headers = [f"Authorization: token {self._token}"]
        socket = websocket.create_connection(url, timeout=PATIENCE, header=headers)
        self._sockets.append(socket)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()


def ask(socket: websocket.WebSocket, msg_type: str, content: dict[str, Any], channel: str = "shell") -> list[Any]:
    """Sends a request over the websocket; all that comes back for it, until its idle status and its reply."""
    header = {"msg_id": uuid4().hex, "msg_type": msg_type, "username": "", "session": uuid4().hex, "version": "5.3"}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": channel}
    socket.send(json.dumps({**message, "buffers": []}))
    answers: list[Any] = []
    kinds: set[str] = set()
    while not {"idle", msg_type.replace("request", "reply")} <= kinds:
        answer = json.loads(socket.recv())
        if answer["parent_header"].get("msg_id") == header["msg_id"]:
            answers.append(answer)
            kinds |= {answer["msg_type"], answer["content"].get("execution_state", "")}
    return answers


def execute(socket: websocket.WebSocket, code: str) -> str:
    answers = ask(socket, "execute_request", {"code": code, "silent": False, "allow_stdin": False})
    return "".join(answer["content"]["text"] for answer in answers if answer["msg_type"] == "stream")


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A Jupyter server that was started with JUPYTER_DEFAULT_PROVISIONER_NAME=torpor and nothing else."""
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "torpor")
    token = secrets.token_hex(16)
    options = ["--ip=127.0.0.1", "--port=0", "--allow-root", f"--ServerApp.root_dir={home}"]
    with open(home / "server.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", *options],
            env={**os.environ, "JUPYTER_TOKEN": token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    (facts,) = eventually(lambda: list((home / "jupyter_runtime_dir").glob("jpserver-*.json")), bool)
    found = Server(eventually(lambda: _read_url(facts), bool), token)
    eventually(found.answers, bool)  # the file comes before the server listens
    yield found
    found.close()
    process.terminate()
    process.wait()


def _read_url(facts: Path) -> str:
    try:
        return str(json.loads(facts.read_text())["url"])
    except ValueError:
        return ""


def test_a_jupyter_server_keeps_kernel_and_websocket(agent: StandInAgent, server: Server) -> None:
    kernel = server.request("POST", "kernels", {"name": "python3"})["id"]
    socket = server.connect(kernel)
    assert execute(socket, "x = 41; print(x)") == "41\n"
    agent.hibernate(agent.only)

    assert server.request("GET", f"kernels/{kernel}")["execution_state"] == "idle"
    reloaded = server.connect(kernel)  # as a page does that is loaded again
    ask(reloaded, "kernel_info_request", {})
    ask(reloaded, "comm_info_request", {"target_name": "jupyter.widget"})
    assert agent.only.state == "hibernated"

    assert execute(reloaded, "print(x + 1)") == "42\n"
    assert execute(socket, "print(x)") == "41\n"

    agent.hibernate(agent.only)
    server.request("POST", f"kernels/{kernel}/restart")
    assert agent.sessions["s0"].state == "ended"
    assert "resume" not in agent.sessions["s0"].calls[-3:]
    assert execute(server.connect(kernel), "print('x' in globals())") == "False\n"

    agent.hibernate(agent.newest)
    server.request("DELETE", f"kernels/{kernel}")
    assert agent.newest.state == "ended"


def test_a_server_that_sees_its_kernel_die_starts_another(agent: StandInAgent, server: Server) -> None:
    kernel = server.request("POST", "kernels", {"name": "python3"})["id"]
    socket = server.connect(kernel)
    execute(socket, "x = 1")
    agent.only.process.kill()
    eventually(lambda: len(agent.sessions), (2).__eq__)
    assert execute(server.connect(kernel), "print('x' in globals())") == "False\n"
    assert [session.state for session in agent.sessions.values()] == ["failed", "running"]


def test_a_server_that_is_killed_leaves_its_kernels_asleep(agent: StandInAgent, server: Server) -> None:
    kernel = server.request("POST", "kernels", {"name": "python3"})["id"]
    execute(server.connect(kernel), "x = 1")
    pid = server.request("GET", "status") and _server_pid(agent.home)
    os.kill(pid, 9)
    agent.wait_for(agent.only, "hibernated")


def _server_pid(home: Path) -> int:
    (facts,) = (home / "jupyter_runtime_dir").glob("jpserver-*.json")
    return int(json.loads(facts.read_text())["pid"])
