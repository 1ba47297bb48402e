"""CRIU hangs, or is killed, in the middle: the session goes on, or stays away, and nothing is left of the attempt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.faulty_criu import silent, stricken
from tests.acceptance.pausing import paused
from tests.acceptance.traces import assert_as_before, processes, traces
from tests.installation import PYTHON, Installation

from torpor.engine import procfs
from torpor.errors import EngineError

COUNT = """
import os, subprocess, threading, time
memory = os.urandom(16 << 20)
child = subprocess.Popen(["sleep", "1000"])
threading.Thread(target=lambda: time.sleep(1e6), daemon=True).start()
number = 0
while True:
    number += 1
    print(number, child.poll() is None, flush=True)
    time.sleep(0.02)
"""
SHORT = "2"  # seconds


def counting(agent: Installation) -> dict[str, Any]:
    agent.run(PYTHON, "-c", COUNT, name="count")
    agent.wait_for_output("count", "\n3 ")
    return agent.client.session("count")


def assert_counts_on(agent: Installation) -> None:
    """It goes on counting, has lost no number, and nobody traces or stops it."""
    here = agent.output("count").count("\n")
    lines = agent.wait_for_output("count", f"\n{here + 3} ").splitlines()
    assert lines == [f"{number} True" for number in range(1, len(lines) + 1)]
    pids = agent.client.session("count")["pids"]
    assert not procfs.traced(pids)
    assert not [pid for pid in pids if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"]


def assert_works_again(agent: Installation) -> None:
    agent.operate("count", "hibernate")
    agent.operate("count", "resume")
    assert_counts_on(agent)


def test_a_criu_that_does_nothing_is_ended_at_its_deadline(make_installation: Callable[[], Installation]) -> None:
    agent = make_installation()
    agent.start(TORPOR_CRIU=str(silent(agent.home)), TORPOR_LEAST_DEADLINE=SHORT)
    session = counting(agent)
    before = traces(agent)
    with pytest.raises(EngineError, match=r"within \d+ seconds and was ended"):
        agent.operate("count", "hibernate")
    found = agent.client.session("count")
    assert (found["state"], found["pids"], found["error"]["code"]) == ("running", session["pids"], "engine")
    assert_counts_on(agent)
    assert_as_before(agent, before)


@pytest.mark.parametrize(("kind", "signum"), [("checkpoint", signal.SIGSTOP), ("hibernate", signal.SIGKILL)])
def test_criu_stopped_or_killed_while_the_session_is_frozen(
    make_installation: Callable[[], Installation], kind: str, signum: signal.Signals
) -> None:
    agent = make_installation()
    fault = agent.home / "fault"
    fault.touch()
    agent.start(TORPOR_CRIU=str(stricken(agent.home, "dump", signum, fault)), TORPOR_LEAST_DEADLINE=SHORT)
    session = counting(agent)
    before = traces(agent)
    with pytest.raises(EngineError):
        agent.operate("count", kind)
    found = agent.client.session("count")
    assert (found["state"], found["pids"]) == ("running", session["pids"])
    assert_counts_on(agent)
    assert_as_before(agent, before)
    fault.unlink()
    assert_works_again(agent)


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_criu_stopped_or_killed_while_it_restores(
    make_installation: Callable[[], Installation], signum: signal.Signals
) -> None:
    agent = make_installation()
    fault = agent.home / "fault"
    agent.start(TORPOR_CRIU=str(stricken(agent.home, "restore", signum, fault)), TORPOR_LEAST_DEADLINE=SHORT)
    counting(agent)
    agent.operate("count", "hibernate")
    before = traces(agent)
    fault.touch()
    with pytest.raises(EngineError):
        agent.operate("count", "resume")
    found = agent.client.session("count")
    assert (found["state"], found["pids"]) == ("hibernated", [])
    assert_as_before(agent, before)
    fault.unlink()
    agent.operate("count", "resume")
    assert_counts_on(agent)


@pytest.mark.parametrize(("kind", "step"), [("hibernate", "dump"), ("resume", "restore")])
@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_criu_stopped_or_killed_while_it_waits_for_our_answer(
    make_installation: Callable[[], Installation], kind: str, step: str, signum: signal.Signals
) -> None:
    """The moments when everything hangs on CRIU: the tree is frozen and saved, or restored and not yet running."""
    agent = make_installation()
    agent.start(TORPOR_LEAST_DEADLINE=SHORT, TORPOR_PAUSE_AFTER=f"{kind}:{step}")
    counting(agent)
    if kind == "resume":
        agent.operate("count", "hibernate")
    with paused(agent, "count", kind, step) as worker:
        for pid in procfs.tree(worker.pid):
            if b"--images-dir" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signum)
    found = agent.wait_for_state("count", "running", "hibernated")
    if found["state"] == "hibernated":
        agent.stop()
        agent.start()
        agent.operate("count", "resume")
    assert_counts_on(agent)
    assert list(processes(agent).values()).count("sleep N") == 1
