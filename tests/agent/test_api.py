"""The API as its client sees it: sessions started, found, watched, signalled, ended and removed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.installation import PYTHON, Installation, eventually

from torpor.client import Client
from torpor.errors import AgentUnreachable, Conflict, NotFound, TorporError, UsageError
from torpor.paths import from_environment

FIELDS = {
    "id",
    "name",
    "state",
    "owner",
    "pids",
    "node",
    "labels",
    "created",
    "last_activity",
    "idle_seconds",
    "verdict",
    "checkpoints",
}


def raw(installation: Installation, method: str, route: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    """A request that the client would never send."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(installation.paths.agent_socket))
    head = f"{method} {route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + body)
    response = http.client.HTTPResponse(connection)
    response.begin()
    with connection, response:
        return response.status, json.loads(response.read())


def test_the_node_says_who_serves_it(shared_agent: Installation) -> None:
    node = shared_agent.client.node()
    assert shared_agent.agent is not None
    assert node["agent"]["pid"] == shared_agent.agent.pid
    assert node["agent"]["url"] == f"unix:{shared_agent.paths.agent_socket}"
    assert node["keeper"]["pid"] != node["agent"]["pid"]
    assert node["node"] == socket.gethostname()


def test_a_session_has_every_field(shared_agent: Installation) -> None:
    session = shared_agent.run("sleep", "1000", name="fields", labels={"team": "vision"}, idle_after=3600.0)
    [listed] = [one for one in shared_agent.client.sessions() if one["name"] == "fields"]
    assert set(listed) >= FIELDS
    assert listed["state"] == "running"
    assert listed["labels"] == {"team": "vision"}
    assert listed["verdict"].keys() >= {"verdict", "since", "sentence"}
    init, command = listed["pids"]
    assert Path(f"/proc/{command}/cmdline").read_bytes() == b"sleep\x001000\0"
    assert Path(f"/proc/{init}/comm").read_text() == "torpor-init\n"
    assert shared_agent.client.session(session["id"])["name"] == "fields"


def test_a_name_is_made_from_the_command(shared_agent: Installation) -> None:
    assert shared_agent.run("/bin/sleep", "1000")["name"].startswith("sleep-")


def test_a_watch_answers_when_the_state_changes(shared_agent: Installation) -> None:
    session = shared_agent.run("sleep", "1000")
    seen: list[dict[str, Any]] = []
    watch = threading.Thread(target=lambda: seen.append(shared_agent.client.watch(session["id"], session["version"])))
    watch.start()
    shared_agent.client.signal(session["id"], signal.SIGTERM)
    watch.join(timeout=60)
    assert [(one["state"], one["exit_status"]) for one in seen] == [("failed", 143)]


def test_a_watch_gives_up_at_its_timeout(shared_agent: Installation) -> None:
    session = shared_agent.run("sleep", "1000")
    assert shared_agent.client.watch(session["id"], session["version"], timeout=0.1)["state"] == "running"


def test_logs_are_followed_to_the_end(shared_agent: Installation) -> None:
    session = shared_agent.run("sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.1; done")
    assert b"".join(shared_agent.client.logs(session["id"], follow=True)) == b"line 1\nline 2\nline 3\n"


def test_an_ended_session_keeps_its_checkpoints_only_if_asked(shared_agent: Installation) -> None:
    kept, gone = shared_agent.run("sleep", "1000"), shared_agent.run("sleep", "1000")
    for session in (kept, gone):
        shared_agent.operate(session["id"], "checkpoint")
    assert shared_agent.client.end(kept["id"], keep=True)["state"] == "ended"
    assert shared_agent.client.end(gone["id"], keep=False)["state"] == "ended"
    assert len(shared_agent.client.checkpoints(kept["id"])) == 1
    assert shared_agent.client.checkpoints(gone["id"]) == []
    assert shared_agent.client.session(kept["id"])["pids"] == []


def test_a_session_that_ignores_sigterm_is_ended_all_the_same(shared_agent: Installation) -> None:
    session = shared_agent.run("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done")
    shared_agent.wait_for_output(session["id"], "ready")
    assert shared_agent.client.end(session["id"], keep=False)["exit_status"] == 137


def test_a_live_session_is_removed_by_force_only(shared_agent: Installation) -> None:
    session = shared_agent.run("sleep", "1000")
    with pytest.raises(Conflict, match="is running"):
        shared_agent.client.remove(session["id"])
    shared_agent.operate(session["id"], "checkpoint")
    assert shared_agent.client.remove(session["id"], force=True)["bytes_freed"] > 0
    with pytest.raises(NotFound):
        shared_agent.client.session(session["id"])
    assert not Path(session["folder"]).exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in session["pids"])


def test_files_of_a_session_are_its_owners_only(shared_agent: Installation) -> None:
    session = shared_agent.run("sleep", "1000", io="streams")
    folder = Path(session["folder"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(shared_agent.paths.site_key.stat().st_mode) == 0o600
    assert len(shared_agent.paths.site_key.read_bytes()) == 32
    assert stat.S_IMODE(shared_agent.paths.database.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"argv": []}, "no command"),
        ({"argv": ["true"], "cwd": "somewhere"}, "is not absolute"),
        ({"argv": ["true"], "name": "../up"}, "cannot be a session's name"),
        ({"argv": ["true"], "name": ""}, "cannot be a session's name"),
        ({"argv": ["tr\0ue"]}, "zero byte"),
        ({"argv": ["true"], "env": {"A=B": "c"}}, "equals sign"),
        ({"argv": ["true"], "idle_after": -1.0}, "longer than nothing"),
        ({"argv": ["true"], "rows": 0}, "not possible"),
        ({"argv": ["true"], "labels": {"a b": "c"}}, "label's name"),
        ({"argv": ["true"], "kind": "server"}, "no kind of session"),
        ({"argv": ["true"], "io": "telepathy"}, "not understood"),
    ],
)
def test_a_request_that_is_wrong_starts_nothing(
    shared_agent: Installation, facts: dict[str, Any], problem: str
) -> None:
    before = len(shared_agent.client.sessions())
    with pytest.raises(UsageError, match=problem):
        shared_agent.client.create_session(**{"cwd": "/", "env": {}, **facts})
    assert len(shared_agent.client.sessions()) == before


def test_a_session_that_cannot_start_leaves_nothing(shared_agent: Installation) -> None:
    before = os.listdir(shared_agent.paths.state / "sessions")
    with pytest.raises(TorporError, match="working directory"):
        shared_agent.client.create_session(["true"], cwd="/no/such/folder", env={}, name="nowhere")
    assert "nowhere" not in [session["name"] for session in shared_agent.client.sessions()]
    assert os.listdir(shared_agent.paths.state / "sessions") == before


def test_what_is_no_request_is_refused_in_json(shared_agent: Installation) -> None:
    assert raw(shared_agent, "GET", "/v2/sessions")[0] == 404
    assert raw(shared_agent, "DELETE", "/v1/node")[0] == 405
    status, told = raw(shared_agent, "POST", "/v1/sessions", b"{" * 100)
    assert (status, told["code"]) == (400, "usage")
    status, told = raw(shared_agent, "POST", "/v1/sessions", b'"' + b"x" * (5 << 20) + b'"')
    assert (status, told["code"]) == (400, "usage")
    assert "larger than" in told["message"]


def test_a_silent_or_slow_caller_holds_up_nobody(shared_agent: Installation) -> None:
    session = shared_agent.run(PYTHON, "-c", "print('x' * 4000000, flush=True)")
    shared_agent.wait_for_state(session["id"], "ended")
    silent = []
    for _ in range(20):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(shared_agent.paths.agent_socket))
        silent.append(connection)
    silent[0].sendall(f"GET /v1/sessions/{session['id']}/logs HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    silent[1].sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert shared_agent.client.session(session["id"])["state"] == "ended"
    for connection in silent:
        connection.close()


def test_no_agent_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable, match="torpor up"):
        Client(from_environment({"TORPOR_HOME": str(tmp_path)})).sessions()


def test_a_second_agent_on_the_same_folders_is_refused(shared_agent: Installation) -> None:
    refused = shared_agent.torpor("up")
    assert refused.returncode == Conflict.exit_status
    assert "already" in refused.stderr
    assert shared_agent.client.node()


def test_a_changed_policy_with_a_mistake_leaves_the_old_one_in_force(agent: Installation) -> None:
    agent.paths.config.write_text('[policy]\nidle_after = "2h"\n')
    session = agent.run("sleep", "1000")
    assert agent.client.why(session["id"])["idle_after"] == 7200
    agent.paths.config.write_text("[policy]\nidle_after = 3\n")
    told = eventually(lambda: agent.client.why(session["id"]), lambda why: why["policy_problem"] is not None)
    assert told["idle_after"] == 7200
    assert "idle_after" in told["policy_problem"]["message"]


def test_a_policy_with_a_mistake_keeps_an_agent_from_starting(make_installation: Any) -> None:
    installation = make_installation()
    installation.paths.config.write_text("[policy]\nidle = 1\n")
    refused = installation.torpor("up")
    assert refused.returncode == UsageError.exit_status
    assert "policy.idle is unknown" in refused.stderr
