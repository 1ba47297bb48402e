"""Another user on the same machine: sees nothing of others, and starts sessions as themselves only."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.agent.people import ASK, GID, GROUP, UID, Somebody
from tests.installation import PATIENCE, PYTHON, Installation


@pytest.fixture
def somebody(agent: Installation) -> Somebody:
    return Somebody(agent)


def test_others_sessions_cannot_be_seen_or_touched(agent: Installation, somebody: Somebody) -> None:
    mine = agent.run("sleep", "1000", name="mine")
    checkpoint = agent.operate("mine", "checkpoint")["id"]
    assert somebody.ask("sessions") == []
    for ref in ("mine", mine["id"]):
        for method, arguments in {
            "session": {},
            "watch": {"version": 0},
            "why": {},
            "checkpoints": {},
            "signal": {"signum": 15},
            "end": {"keep": False},
            "remove": {"force": True},
        }.items():
            assert somebody.ask(method, ref=ref, **arguments)["code"] == "not_found", method
        for kind in ("checkpoint", "hibernate", "resume"):
            assert somebody.ask("operation", ref=ref, kind=kind)["code"] == "not_found"
        assert somebody.ask("logs", ref=ref)["code"] == "not_found"
        assert somebody.ask("verify", ref=ref)["code"] == "not_found"
        for method, arguments in {
            "put_kernel": {"kernel": {"execution_state": "idle", "since": 0.0}},
            "quiesced": {"version": 1, "ok": True},
            "answered": {"version": 1},
        }.items():
            assert somebody.ask(method, ref=ref, **arguments)["code"] == "not_found"
    assert somebody.ask("verify", ref=checkpoint)["code"] == "not_found"
    assert agent.client.session("mine")["state"] == "running"


def test_nothing_of_others_can_be_read_from_the_disk(agent: Installation, somebody: Somebody) -> None:
    mine = agent.run("sleep", "1000", name="mine", io="streams")
    agent.operate("mine", "checkpoint")
    folder = Path(mine["folder"])
    for path in (
        agent.paths.site_key,
        agent.paths.database,
        agent.paths.store,
        agent.paths.state,
        folder,
        folder / "out.log",
        folder / "exit",
        agent.paths.keeper_socket,
    ):
        refused = somebody.run("ls" if path.is_dir() else "cat", str(path))
        assert refused.returncode != 0, path
        assert "Permission denied" in refused.stderr or "No such device" in refused.stderr


def test_a_session_runs_as_the_caller(agent: Installation, somebody: Somebody) -> None:
    session = somebody.start("sh", "-c", "id -u; id -g; id -G; umask; sleep 1000", name="theirs")
    assert (session["uid"], session["owner"]) == (UID, str(UID))
    text = agent.wait_for_output(session["id"], "00")
    assert text.split("\n")[:3] == [str(UID), str(GID), f"{GID} {GROUP}"]
    assert [one["name"] for one in somebody.ask("sessions")] == ["theirs"]
    init, command, *_ = somebody.ask("session", ref="theirs")["pids"]
    assert {os.stat(f"/proc/{pid}").st_uid for pid in (init, command)} == {UID}


def test_root_sees_all_and_names_are_each_owners_own(agent: Installation, somebody: Somebody) -> None:
    theirs = somebody.start("sleep", "1000", name="same")
    assert agent.client.session("same")["id"] == theirs["id"]
    mine = agent.run("sleep", "1000", name="same")
    assert agent.client.session("same")["id"] == mine["id"]
    assert agent.client.session(theirs["id"])["uid"] == UID
    assert somebody.ask("session", ref="same")["id"] == theirs["id"]
    assert len(agent.client.sessions()) == 2


def test_another_users_session_is_whole_after_a_hibernation_or_its_refusal(
    agent: Installation, somebody: Somebody
) -> None:
    """Where root lacks CAP_SYS_RESOURCE, CRIU cannot save another user's processes."""
    session = somebody.start("sh", "-c", "trap 'echo woken' USR1; echo up; while :; do sleep 0.05; done")
    agent.wait_for_output(session["id"], "up")
    answer = somebody.ask("operation", ref=session["id"], kind="hibernate")
    if "code" in answer:
        assert answer["code"] == "engine"
        assert somebody.ask("session", ref=session["id"])["pids"][:2] == session["pids"][:2]
    else:
        assert somebody.ask("session", ref=session["id"])["state"] == "hibernated"
        somebody.ask("operation", ref=session["id"], kind="resume")
    somebody.ask("signal", ref=session["id"], signum=10)
    agent.wait_for_output(session["id"], "woken")
    init, command, *_ = somebody.ask("session", ref=session["id"])["pids"]
    assert {os.stat(f"/proc/{pid}").st_uid for pid in (init, command)} == {UID}


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        (("unshare", "--mount"), ["mount namespace"]),
        (("unshare", "--net"), ["network namespace"]),
        (("unshare", "--pid", "--fork"), ["process namespace"]),
        (("unshare", "--mount", "--net"), ["mount and network namespace"]),
    ],
)
def test_a_caller_in_namespaces_of_its_own_is_refused(
    agent: Installation, somebody: Somebody, wrapper: tuple[str, ...], words: list[str]
) -> None:
    refused = somebody.ask("create_session", argv=["true"], cwd="/", env={}, wrapper=wrapper)
    assert refused["code"] == "incompatible"
    assert all(word in refused["message"] for word in words)
    assert agent.client.sessions() == []


def test_a_caller_in_a_user_namespace_of_its_own_is_refused(agent: Installation, somebody: Somebody) -> None:
    request = json.dumps(["create_session", {"argv": ["true"], "cwd": "/", "env": {}}])
    done = somebody.run("unshare", "--user", PYTHON, "-S", "-c", ASK, request)
    refused = json.loads(done.stdout)
    assert refused["code"] == "incompatible"
    assert "user namespace" in refused["message"]
    assert agent.client.sessions() == []


def test_a_caller_in_a_changed_root_is_refused(agent: Installation, somebody: Somebody) -> None:
    root = agent.home / "root"
    root.mkdir()
    script = (
        f"mount --rbind / {root} && mount --make-rprivate {root} && "
        f'exec chroot {root} setpriv --reuid={UID} --regid={GID} --clear-groups {PYTHON} -S -c "$ASK" "$REQUEST"'
    )
    request = json.dumps(["create_session", {"argv": ["true"], "cwd": "/", "env": {}}])
    environment = {
        "PATH": os.environ["PATH"],
        "TORPOR_HOME": str(agent.home),
        "PYTHONPATH": str(somebody.library),
        "ASK": ASK,
        "REQUEST": request,
    }
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert json.loads(done.stdout)["code"] == "incompatible", done.stderr
