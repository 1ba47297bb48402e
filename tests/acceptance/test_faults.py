"""Full disks, taken ports, and a session that dies in the middle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.acceptance.pausing import paused
from tests.acceptance.traces import assert_as_before, traces
from tests.installation import PYTHON, Installation

from torpor.errors import Conflict, StoreError

MIB = 1 << 20
COUNT = """
import os, time
memory = os.urandom(24 << 20)
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.02)
"""
LISTEN = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"hello")
    connection.close()
"""


@pytest.fixture
def small_store(make_installation: Callable[[], Installation]) -> Iterator[Installation]:
    """An installation, not started, whose store is on a disk of 128 MiB."""
    agent = make_installation()
    agent.paths.store.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m,mode=0700", "none", agent.paths.store], check=True)
    yield agent
    subprocess.run(["umount", "--lazy", agent.paths.store], check=True)


def assert_counts_on(agent: Installation) -> None:
    here = agent.output("count").count("\n")
    lines = agent.wait_for_output("count", f"\n{here + 3}\n").splitlines()
    assert lines == [str(number) for number in range(1, len(lines) + 1)]


def store_files(agent: Installation) -> list[str]:
    return sorted(
        str(path) for name in ("packs", "incoming", "manifests") for path in (agent.paths.store / name).rglob("*")
    )


def test_a_disk_that_fills_up_leaves_the_session_running_and_the_store_clean(small_store: Installation) -> None:
    agent = small_store
    agent.start(TORPOR_PAUSE_AFTER="hibernate:preflight")
    agent.run(PYTHON, "-c", COUNT, name="count")
    agent.wait_for_output("count", "\n3\n")
    before, files = traces(agent), store_files(agent)
    ballast = agent.paths.store / "ballast"
    with paused(agent, "count", "hibernate", "preflight"), ballast.open("wb") as file:
        space = os.statvfs(agent.paths.store)
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - 10 * MIB)
    found = agent.client.session("count")
    assert (found["state"], found["error"]["code"]) == ("running", "store")
    assert "no room left" in found["error"]["message"]
    assert_counts_on(agent)
    ballast.unlink()
    assert store_files(agent) == files
    assert_as_before(agent, before)
    with paused(agent, "count", "hibernate", "preflight"):
        pass
    assert agent.client.session("count")["state"] == "hibernated"
    agent.operate("count", "resume")
    assert_counts_on(agent)


def test_too_small_a_disk_is_seen_before_anything_is_touched(small_store: Installation) -> None:
    agent = small_store
    agent.start()
    agent.run(PYTHON, "-c", COUNT, name="count")
    agent.wait_for_output("count", "\n3\n")
    (agent.paths.store / "ballast").write_bytes(bytes(60 * MIB))
    for kind in ("checkpoint", "hibernate"):
        with pytest.raises(StoreError, match="MiB free") as refused:
            agent.operate("count", kind)
        assert "Nothing was touched" in refused.value.safe
    assert_counts_on(agent)


def test_a_port_that_was_taken_meanwhile(shared_agent: Installation) -> None:
    session = shared_agent.run(PYTHON, "-c", LISTEN, name="server")
    port = int(shared_agent.wait_for_output("server", "\n"))
    shared_agent.operate("server", "hibernate")
    before = traces(shared_agent)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(Conflict, match=f"port {port} of 127.0.0.1"):
        shared_agent.operate("server", "resume")
    found = shared_agent.client.session("server")
    assert (found["state"], found["pids"], found["error"]["code"]) == ("hibernated", [], "conflict")
    assert_as_before(shared_agent, before)
    shared_agent.operate("server", "resume")
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        assert client.recv(10) == b"hello"
    shared_agent.client.remove(session["id"], force=True)


def test_a_session_that_is_killed_before_it_is_frozen_has_ended(make_installation: Callable[[], Installation]) -> None:
    agent = make_installation()
    agent.start(TORPOR_PAUSE_AFTER="hibernate:preflight")
    session = agent.run(PYTHON, "-c", COUNT, name="count")
    with paused(agent, "count", "hibernate", "preflight"):
        os.kill(session["pids"][0], signal.SIGKILL)
    found = agent.wait_for_state("count", "failed")
    assert (found["exit_status"], found["pids"], found["checkpoints"]) == (137, [], [])
    assert store_files(agent) == []


@pytest.mark.parametrize("step", ["dump", "verify"])
def test_a_session_that_is_killed_while_it_is_frozen_is_its_checkpoint(
    make_installation: Callable[[], Installation], step: str
) -> None:
    agent = make_installation()
    agent.start(TORPOR_PAUSE_AFTER=f"hibernate:{step}")
    session = agent.run(PYTHON, "-c", COUNT, name="count")
    agent.wait_for_output("count", "\n3\n")
    with paused(agent, "count", "hibernate", step):
        os.kill(session["pids"][0], signal.SIGKILL)
    assert agent.client.session("count")["state"] == "hibernated"
    agent.operate("count", "resume")
    assert_counts_on(agent)


def test_nothing_is_done_to_a_session_in_the_middle_of_something_else(
    make_installation: Callable[[], Installation],
) -> None:
    agent = make_installation()
    agent.start(TORPOR_PAUSE_AFTER="hibernate:dump")
    agent.run(PYTHON, "-c", COUNT, name="count")
    agent.wait_for_output("count", "\n3\n")
    with paused(agent, "count", "hibernate", "dump"):
        for kind in ("checkpoint", "hibernate"):
            with pytest.raises(Conflict):
                agent.operate("count", kind)
        with pytest.raises(Conflict):
            agent.client.remove("count")
    assert agent.client.session("count")["state"] == "hibernated"
    assert Path(agent.client.session("count")["folder"]).is_dir()
