"""One user can neither fill the agent's memory nor keep others from it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.agent.people import UID, Somebody
from tests.installation import PYTHON, Installation, eventually

from torpor.agent import shares
from torpor.agent.operations import SAVES_AT_ONCE
from torpor.api.peer import CONNECTIONS_PER_USER
from torpor.model import Caller, Launch, Session, State

OTHER_UID = 54351
MEMORY = 256 << 20  # bytes that the agent may grow by, whatever one user does

MANY = """
import socket, sys
path, count, request, filler = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode(), int(sys.argv[4])
held = []
for _ in range(count):
    one = socket.socket(socket.AF_UNIX)
    one.connect(path)
    one.settimeout(0.05)
    try:
        one.sendall(request)
        one.sendall(b"x" * filler)
    except OSError:
        pass
    held.append(one)
closed = 0
for one in held[512:]:
    one.settimeout(30)
    try:
        closed += one.recv(1) == b""
    except (TimeoutError, ConnectionResetError) as error:
        closed += isinstance(error, ConnectionResetError)
print(closed, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def somebody(agent: Installation) -> Somebody:
    return Somebody(agent)


def crowd(agent: Installation, count: int, request: str, filler: int = 0) -> subprocess.Popen[str]:
    """The user with many connections at once, each with a request and `filler` bytes after it; none is read."""
    command = [PYTHON, "-c", MANY, str(agent.paths.agent_socket), str(count), request, str(filler)]
    return subprocess.Popen(
        ["setpriv", f"--reuid={UID}", "--regid=54322", "--clear-groups", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def memory(agent: Installation) -> int:
    assert agent.agent is not None
    return int(Path(f"/proc/{agent.agent.pid}/statm").read_text().split()[1]) * 4096


def test_too_many_connections_of_one_user_are_closed_and_others_are_served(
    agent: Installation, somebody: Somebody
) -> None:
    with crowd(agent, CONNECTIONS_PER_USER + 60, "") as many:
        assert many.stdout is not None
        assert int(many.stdout.readline()) >= 50
        other = Somebody(agent, OTHER_UID, ())
        assert other.start("true")["uid"] == OTHER_UID
        assert len(agent.client.sessions()) == 1
        many.communicate("")
    assert eventually(lambda: somebody.ask("sessions"), lambda seen: seen == []) == []


def test_large_requests_of_one_user_fill_no_memory_and_hold_up_nobody(agent: Installation, somebody: Somebody) -> None:
    before = memory(agent)
    request = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: {4 << 20}\r\n\r\n"
    with crowd(agent, 300, request, (4 << 20) - 1) as many:
        assert many.stdout is not None
        many.stdout.readline()
        assert Somebody(agent, OTHER_UID, ()).start("true")["uid"] == OTHER_UID
        assert memory(agent) - before < MEMORY
        many.communicate("")


def test_large_answers_that_one_user_does_not_read_fill_no_memory(agent: Installation, somebody: Somebody) -> None:
    for _ in range(8):
        session = somebody.run(PYTHON, "-S", "-c", CREATE_LARGE)
        assert session.stdout == "ok\n", session.stderr
    before = memory(agent)
    with crowd(agent, 200, "GET /v1/sessions HTTP/1.1\r\nHost: x\r\n\r\n") as many:
        assert many.stdout is not None
        many.stdout.readline()
        assert Somebody(agent, OTHER_UID, ()).start("true")["uid"] == OTHER_UID
        assert len(agent.client.sessions()) == 9
        assert memory(agent) - before < MEMORY
        many.communicate("")
    assert len(somebody.ask("sessions")) == 8


CREATE_LARGE = """
from torpor.client import Client
Client().create_session(["true"], cwd="/", env={f"NAME_{number}": "x" * 100_000 for number in range(10)})
print("ok")
"""


def test_small_requests_have_small_bodies(agent: Installation, somebody: Somebody) -> None:
    session = somebody.start("sleep", "1000")
    refused = somebody.ask("quiesced", ref=session["id"], version=1, ok=False, reason="x" * 70_000)
    assert refused["code"] == "usage"


def test_a_user_has_a_limited_number_of_sessions(agent: Installation, somebody: Somebody) -> None:
    with agent.registry() as registry:
        for number in range(shares.SESSIONS_PER_USER):
            registry.create_session(
                Session(
                    id=f"{number:012x}",
                    name=f"s{number}",
                    state=State.ENDED,
                    uid=UID,
                    owner=str(UID),
                    node="n",
                    created=1.0,
                    launch=Launch(("true",), "/", {}),
                    caller=Caller(UID, UID),
                )
            )
    refused = somebody.start("true")
    assert refused["code"] == "conflict"
    assert f"a user may have {shares.SESSIONS_PER_USER}" in refused["message"]
    assert Somebody(agent, OTHER_UID, ()).start("true")["uid"] == OTHER_UID
    somebody.ask("remove", ref="s7")
    assert somebody.start("true")["uid"] == UID


def test_commands_and_environments_of_one_user_are_limited_together(agent: Installation, somebody: Somebody) -> None:
    with agent.registry() as registry:
        registry.create_session(
            Session(
                id="0" * 12,
                name="large",
                state=State.ENDED,
                uid=UID,
                owner=str(UID),
                node="n",
                created=1.0,
                launch=Launch(("true",), "/", {"NAME": "x" * shares.LAUNCH_BYTES_PER_USER}),
                caller=Caller(UID, UID),
            )
        )
    refused = somebody.start("true")
    assert refused["code"] == "conflict"
    assert "would be larger than 16 MiB" in refused["message"]


def test_a_users_sessions_are_saved_a_few_at_a_time(agent: Installation, somebody: Somebody) -> None:
    count = 2 * SAVES_AT_ONCE + 1
    names = [somebody.start("sleep", "1000", name=f"s{number}")["name"] for number in range(count)]
    command = [
        PYTHON,
        "-S",
        "-c",
        "import sys; from torpor.client import Client; list(Client().operation(*sys.argv[1:]))",
    ]
    environment = {**agent.environment, "PYTHONPATH": str(somebody.library), "PATH": os.environ["PATH"]}
    saving = [subprocess.Popen([*command, name, "hibernate"], env=environment) for name in names]
    most = 0
    with agent.keeper() as keeper:
        while any(one.poll() is None for one in saving):
            most = max(most, len(keeper.workers()))
    assert [one.wait() for one in saving] == [0] * count
    assert 0 < most <= SAVES_AT_ONCE
    assert {one["state"] for one in agent.client.sessions()} == {"hibernated"}
