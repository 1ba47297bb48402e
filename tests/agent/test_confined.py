"""What a caller does not have, its session does not get: limits that cannot be reproduced are refused."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.agent.people import ASK, Somebody
from tests.installation import PYTHON, Installation

from torpor.agent import callers, running
from torpor.api import peer
from torpor.engine import procfs
from torpor.errors import NotFound, NotPermitted

STATUS = "grep -E '^(Cap|Groups|NoNewPrivs)' /proc/self/status; cat /proc/self/oom_score_adj; sleep 1000"

# A filter that allows everything is a filter all the same.
FILTERED = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
"""

KEYRING = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
keyctl = {"x86_64": 250}.get(os.uname().machine, 219)
def tell(*_):
    ring = libc.syscall(keyctl, 0, -3, 0)
    found = libc.syscall(keyctl, 10, ring, b"user", b"torpor-secret", 0)
    print("ring", ring, "found" if found >= 0 else "nothing", flush=True)
signal.signal(signal.SIGUSR1, tell)
tell()
while True:
    signal.pause()
"""


@pytest.fixture
def somebody(agent: Installation) -> Somebody:
    return Somebody(agent)


def test_a_caller_under_a_seccomp_filter_is_refused(agent: Installation, somebody: Somebody) -> None:
    request = json.dumps(["create_session", {"argv": ["true"], "cwd": "/", "env": {}}])
    done = somebody.run(PYTHON, "-S", "-c", FILTERED + ASK, request)
    refused = json.loads(done.stdout)
    assert refused["code"] == "incompatible"
    assert "held back by a seccomp filter" in refused["message"]
    assert agent.client.sessions() == []


def test_a_filter_that_the_agent_is_under_itself_is_no_reason(
    make_installation: Callable[[], Installation], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container, whose filter is around everything in it."""
    filtered = tmp_path / "filtered"
    filtered.write_text(
        f"#!{sys.executable}\n{FILTERED}\nimport os\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    filtered.chmod(0o755)
    agent = make_installation()
    monkeypatch.setattr("tests.installation.sys.executable", str(filtered))
    agent.start()
    monkeypatch.undo()
    session = Somebody(agent).run(PYTHON, "-S", "-c", FILTERED + ASK, json.dumps(["create_session", TRUE]))
    assert json.loads(session.stdout)["state"] == "running", session.stdout
    twice = Somebody(agent).run(PYTHON, "-S", "-c", FILTERED + FILTERED + ASK, json.dumps(["create_session", TRUE]))
    assert json.loads(twice.stdout)["code"] == "incompatible"


TRUE = {"argv": ["sleep", "1000"], "cwd": "/", "env": {"PATH": "/bin"}}


def test_a_caller_with_a_host_name_of_its_own_is_refused(agent: Installation, somebody: Somebody) -> None:
    refused = somebody.ask("create_session", argv=["true"], cwd="/", env={}, wrapper=("unshare", "--uts"))
    assert refused["code"] == "incompatible"
    assert "another host name namespace" in refused["message"]


def as_root(agent: Installation, *wrapper: str, argv: list[str]) -> dict[str, Any]:
    request = json.dumps(["create_session", {"argv": argv, "cwd": "/", "env": {"PATH": os.environ["PATH"]}}])
    done = subprocess.run(
        [*wrapper, PYTHON, "-S", "-c", ASK, request],
        env={**agent.environment, "PYTHONPATH": str(Path(peer.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_root_with_few_capabilities_gets_a_session_with_no_more(agent: Installation, somebody: Somebody) -> None:
    dropping = (PYTHON, "-c", DROP_PERMITTED)
    session = as_root(agent, *dropping, argv=["sh", "-c", STATUS])
    text = agent.wait_for_output(session["id"], "NoNewPrivs")
    facts = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
    assert int(facts["CapBnd"], 16) == int(facts["CapPrm"], 16) == 1 << 5
    assert facts["NoNewPrivs"] == "1"


DROP_PERMITTED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
kill = 1 << 5
data = (ctypes.c_uint32 * 6)(kill, kill, kill, 0, 0, 0)
assert libc.prctl(28, 0x1, 0, 0, 0) == 0  # SECBIT_NOROOT: exec gives root nothing
assert libc.capset(header, data) == 0
assert libc.prctl(47, 2, 5, 0, 0) == 0  # ambient: what exec keeps
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(("adjustment", "expected"), [("700", "700"), ("0", "0")])
def test_a_session_is_as_likely_to_be_killed_for_memory_as_its_caller(
    agent: Installation, somebody: Somebody, adjustment: str, expected: str
) -> None:
    wrapper = ("sh", "-c", f'echo {adjustment} >/proc/self/oom_score_adj && exec "$@"', "sh")
    session = somebody.ask(
        "create_session", argv=["sleep", "1000"], cwd="/", env={"PATH": os.environ["PATH"]}, wrapper=wrapper
    )

    def adjustments() -> set[str]:
        pids = agent.client.session(session["id"])["pids"]
        return {Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in pids}

    assert adjustments() == {expected}
    agent.operate(session["id"], "hibernate")
    agent.operate(session["id"], "resume")
    assert adjustments() == {expected}


def test_a_session_has_neither_the_agents_keyring_nor_anothers(agent: Installation, somebody: Somebody) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 250}.get(os.uname().machine, 219)
    agent.stop()
    with agent.keeper() as keeper:
        keeper.stop()
    add_key = number - 2
    assert libc.syscall(number, 1, None) > 0  # this process, and so the next agent and keeper
    assert libc.syscall(add_key, b"user", b"torpor-secret", b"hidden", 6, -3) > 0
    agent.start()
    first = somebody.start(PYTHON, "-c", KEYRING)["id"]
    second = somebody.start(PYTHON, "-c", KEYRING)["id"]
    rings = {agent.wait_for_output(one, "ring").split()[1] for one in (first, second)}
    assert len(rings) == 2
    for one in (first, second):
        agent.operate(one, "hibernate")
        agent.operate(one, "resume")
        somebody.ask("signal", ref=one, signum=10)
        *_, line = agent.wait_for_output(one, "nothing\nring").splitlines()
        rings.add(line.split()[1])
        assert "found" not in agent.output(one)
    assert len(rings) == 4
    assert str(libc.syscall(number, 0, -3, 0)) not in rings


def test_a_pid_that_became_another_processs_is_not_believed() -> None:
    uid, gid, groups = os.getuid(), os.getgid(), tuple(os.getgroups())
    started = procfs.start_time(os.getpid())
    assert started is not None
    assert callers.facts(os.getpid(), started, uid, gid, groups).uid == uid
    with pytest.raises(NotPermitted, match="is not the one that connected"):
        callers.facts(os.getpid(), started - 1, uid, gid, groups)
    with pytest.raises(NotFound, match="has ended"):
        callers.facts(os.getpid(), 0, uid, gid, groups)


def test_a_peer_is_who_connected_and_not_who_uses_the_connection(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        connect = (
            "import os, socket, sys\n"
            "os.setgroups(list(range(60000, 60400)))\n"
            "os.setresgid(54322, 54322, 54322); os.setresuid(4242, 4242, 4242)\n"
            "sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1]); sys.stdin.read()"
        )
        (tmp_path / "sock").chmod(0o666)
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
        with subprocess.Popen([PYTHON, "-c", connect, str(tmp_path / "sock")], stdin=subprocess.PIPE) as child:
            connection, _ = listener.accept()
            with connection:
                seen = peer.identify(connection)
                assert (seen.pid, seen.uid, seen.gid) == (child.pid, 4242, 54322)
                assert seen.groups == tuple(range(60000, 60400))
                assert seen.is_member(60399)
                assert seen.is_member(54322)
                assert not seen.is_member(0)
                assert not seen.is_member(None)
                assert seen.start_time == procfs.start_time(child.pid)
                child.communicate()
                assert peer.identify(connection).start_time == 0


@pytest.mark.parametrize(
    ("identity", "is_worker"),
    [
        (("--reuid=54321", "--regid=54322", "--clear-groups"), False),
        (("--ruid=54321",), False),  # as a set-user-id program that somebody started
        (("--reuid=0",), True),
    ],
)
def test_a_command_line_makes_no_worker_of_somebodys_process(
    tmp_path: Path, identity: tuple[str, ...], is_worker: bool
) -> None:
    (tmp_path / "torpor" / "sessions").mkdir(parents=True)
    (tmp_path / "torpor" / "sessions" / "worker.py").write_text("print(flush=True); input()")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    command = ["setpriv", *identity, PYTHON, *running.worker_command("o-1")[1:]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = running.find_worker("o-1")
        assert (found is not None and found.pid == child.pid) == is_worker
        assert running.find_worker("o-2") is None
        child.communicate(b"\n")
