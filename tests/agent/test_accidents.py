"""After an accident a session goes on from its last checkpoint, and says what is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.installation import PYTHON, Installation, eventually, kill

from torpor.engine.keeper_client import KeeperClient
from torpor.errors import Conflict

COUNTER = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1]):
    number += 1
    print(number, flush=True)
    time.sleep(0.05)
sys.exit(int(sys.argv[2]))
"""


def counting(agent: Installation, status: int = 3, **facts: Any) -> dict[str, Any]:
    """A session that counts, and ends with `status` when the file `go` exists."""
    session = agent.run(PYTHON, "-c", COUNTER, str(agent.home / "go"), str(status), name="count", **facts)
    agent.wait_for_output("count", "3\n")
    return session


def numbers(agent: Installation) -> list[int]:
    return [int(line) for line in agent.output("count").split()]


def kill_main(agent: Installation) -> None:
    """What the kernel does when memory is short."""
    os.kill(agent.client.session("count")["pids"][1], signal.SIGKILL)


def kill_init(agent: Installation) -> None:
    os.kill(agent.client.session("count")["pids"][0], signal.SIGKILL)


def finish(agent: Installation) -> None:
    (agent.home / "go").touch()


def node_restarts(agent: Installation, *, hibernated: bool = False) -> None:
    """The registry and the processes as a restart of the node leaves them."""
    agent.kill()
    with agent.registry() as registry:
        session = registry.by_name(os.getuid(), "count")
        assert session is not None
        kill(session.init)
        if not hibernated:
            assert session.init is not None
            registry.update_session(session.id, init=msgspec.structs.replace(session.init, boot_id="an-earlier-boot"))
    with agent.keeper() as keeper:
        keeper.stop(force=True)
    agent.start()


def counts_on(agent: Installation, seen: int, low: int, high: int) -> None:
    """After `seen` numbers, it goes on with one between `low` and `high`, and from there without a gap."""
    found = eventually(lambda: numbers(agent)[seen:], lambda later: len(later) >= 3)
    assert found == list(range(found[0], found[0] + len(found)))
    assert low <= found[0] <= high


@pytest.mark.parametrize("accident", [kill_main, kill_init, finish])
def test_a_session_that_died_goes_on_from_its_last_checkpoint(
    agent: Installation, accident: Callable[[Installation], None]
) -> None:
    counting(agent, status=0)
    low = len(numbers(agent))
    saved = agent.operate("count", "checkpoint")
    high = len(numbers(agent)) + 1
    eventually(lambda: len(numbers(agent)), lambda count: count > high + 5)
    accident(agent)
    found = agent.wait_for_state("count", "failed", "ended")
    assert (found["state"], found["exit_status"]) == (("ended", 0) if accident is finish else ("failed", 137))
    (agent.home / "go").unlink(missing_ok=True)
    seen = len(numbers(agent))
    told = agent.client.compatibility("count")
    assert (told["compatible"], told["checkpoint"], told["lost_seconds"] > 0.25) == (True, saved["id"], True)
    result = agent.operate("count", "resume")
    assert result["id"] == saved["id"]
    assert result["lost_seconds"] == told["lost_seconds"]
    assert re.fullmatch(r"What it did in the .* after its checkpoint of .* is lost\.", result["lost"])
    counts_on(agent, seen, low, high)
    assert agent.client.session("count")["state"] == "running"
    agent.operate("count", "hibernate")
    assert "lost" not in agent.operate("count", "resume")


def test_the_command_says_what_is_lost(agent: Installation) -> None:
    counting(agent)
    agent.operate("count", "checkpoint")
    kill_main(agent)
    agent.wait_for_state("count", "failed")
    shown = agent.torpor("resume", "count", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "count can be resumed here from checkpoint" in shown.stdout
    assert "would be lost" in shown.stdout
    assert agent.client.session("count")["state"] == "failed"
    done = agent.torpor("resume", "count")
    assert done.returncode == 0, done.stderr
    assert re.search(r"What it did in the .* is lost\.", done.stdout)


def test_a_terminal_session_that_died_comes_back_with_a_terminal(agent: Installation) -> None:
    session = agent.run(PYTHON, "-q", "-i", name="count", io="terminal")
    agent.wait_for_output("count", ">>> ")
    agent.operate("count", "checkpoint")
    kill_main(agent)
    agent.wait_for_state("count", "failed")
    agent.operate("count", "resume")
    with agent.keeper() as keeper:
        type_text(keeper, session["id"], b"print(6 * 7)\n")
    agent.wait_for_output("count", "\n42")


def type_text(keeper: KeeperClient, session: str, text: bytes) -> None:
    held = keeper.take_fds(session)
    os.write(held["terminal"], text)
    for descriptor in held.values():
        os.close(descriptor)


def test_without_a_checkpoint_a_failure_stays_one(agent: Installation) -> None:
    counting(agent, on_failure="resume")
    finish(agent)
    assert agent.wait_for_state("count", "failed")["exit_status"] == 3
    with pytest.raises(Conflict, match="no verified checkpoint"):
        agent.operate("count", "resume")
    with pytest.raises(Conflict, match="no verified checkpoint"):
        agent.client.compatibility("count")


@pytest.mark.parametrize("wish", ["session", "policy"])
def test_it_comes_back_by_itself_but_not_again_and_again(agent: Installation, wish: str) -> None:
    if wish == "policy":
        agent.paths.config.write_text('[policy]\non_failure = "resume"\n')
    counting(agent, on_failure="resume" if wish == "session" else None)
    agent.operate("count", "checkpoint")
    before = agent.client.session("count")
    kill_main(agent)
    back = eventually(
        lambda: agent.client.session("count"),
        lambda seen: seen["state"] == "running" and seen["version"] > before["version"],
    )
    assert back["lease"] == before["lease"] + 1
    seen = len(numbers(agent))
    counts_on(agent, seen, 1, seen)
    kill_main(agent)
    again = agent.wait_for_state("count", "failed")
    assert (again["lease"], again["exit_status"]) == (back["lease"], 137)
    assert "failed again at once" in agent.log


def test_what_its_owner_ended_does_not_come_back(agent: Installation) -> None:
    agent.paths.config.write_text('[policy]\non_failure = "resume"\n')
    counting(agent)
    agent.operate("count", "checkpoint")
    agent.client.signal("count", signal.SIGTERM)
    assert agent.wait_for_state("count", "failed")["exit_status"] == 143
    agent.operate("count", "resume")
    assert agent.client.end("count", keep=True)["state"] == "ended"
    assert agent.client.session("count")["lease"] == 1
    agent.client.remove("count")
    assert agent.client.sessions() == []


def test_none_for_a_session_overrules_the_policy(agent: Installation) -> None:
    agent.paths.config.write_text('[policy]\non_failure = "resume"\n')
    counting(agent, on_failure="none")
    agent.operate("count", "checkpoint")
    finish(agent)
    assert agent.wait_for_state("count", "failed")["exit_status"] == 3
    assert agent.client.session("count")["lease"] == 0


def test_a_hibernated_session_comes_back_after_a_restart_of_the_node(agent: Installation) -> None:
    counting(agent)
    agent.operate("count", "hibernate")
    seen = len(numbers(agent))
    node_restarts(agent, hibernated=True)
    assert "lost" not in agent.operate("count", "resume")
    counts_on(agent, seen, seen + 1, seen + 1)


def test_a_running_session_is_offered_its_last_checkpoint_after_a_restart(agent: Installation) -> None:
    counting(agent)
    agent.operate("count", "checkpoint")
    high = len(numbers(agent)) + 1
    node_restarts(agent)
    assert agent.client.session("count")["state"] == "hibernated"
    seen = len(numbers(agent))
    agent.operate("count", "resume")
    counts_on(agent, seen, 1, high)


def test_it_comes_back_by_itself_after_a_restart_of_the_node(agent: Installation) -> None:
    done = agent.torpor(
        *("run", "-d", "--name", "count", "--on-failure", "resume", "--"),
        *(PYTHON, "-c", COUNTER, str(agent.home / "go"), "0"),
    )
    assert done.returncode == 0, done.stderr
    agent.wait_for_output("count", "3\n")
    agent.operate("count", "checkpoint")
    high = len(numbers(agent)) + 1
    node_restarts(agent)
    agent.wait_for_state("count", "running")
    found = eventually(lambda: numbers(agent), lambda later: len(later) >= high + 3)
    assert found[-1] < len(found)
