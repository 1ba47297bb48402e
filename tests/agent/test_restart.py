"""Agent, keeper and node may go at any time: sessions run on, and what became of them is known afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.installation import Installation, eventually, is_alive

from torpor.engine import procfs
from torpor.errors import Conflict
from torpor.model import OperationKind, ProcessId, State

WAIT_FOR = "import sys, os, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\nsys.exit(int(sys.argv[2]))"
PYTHON = "/usr/bin/python3"


def waiting(agent: Installation, status: int, **facts: Any) -> tuple[dict[str, Any], Path]:
    """A session that exits with `status` as soon as the file exists."""
    file = agent.home / f"go-{status}"
    return agent.run(PYTHON, "-c", WAIT_FOR, str(file), str(status), **facts), file


def test_sessions_run_on_without_the_agent_and_are_found_again(agent: Installation) -> None:
    session, file = waiting(agent, 7)
    agent.kill()
    agent.start()
    found = agent.client.session(session["id"])
    assert (found["state"], found["pids"], found["version"]) == ("running", session["pids"], session["version"])
    file.touch()
    assert agent.wait_for_state(session["id"], "failed")["exit_status"] == 7


def test_what_ended_while_the_agent_was_away_is_known(agent: Installation) -> None:
    ended, go = waiting(agent, 0)
    failed, fail = waiting(agent, 9)
    shot = agent.run("sleep", "1000")
    agent.kill()
    go.touch()
    fail.touch()
    os.kill(shot["pids"][0], signal.SIGKILL)
    eventually(lambda: [procfs.tree(one["pids"][0]) for one in (ended, failed, shot)], lambda trees: not any(trees))
    agent.start()
    found = [agent.wait_for_state(one["id"], "ended", "failed") for one in (ended, failed, shot)]
    assert [(one["state"], one["exit_status"]) for one in found] == [("ended", 0), ("failed", 9), ("failed", 137)]


def test_a_clean_stop_leaves_sessions_and_keeper(agent: Installation) -> None:
    session = agent.run("sleep", "1000")
    keeper = agent.client.node()["keeper"]["pid"]
    assert agent.stop() == 0
    assert not agent.paths.agent_socket.exists()
    assert procfs.tree(session["pids"][0]) == session["pids"]
    agent.start()
    assert agent.client.node()["keeper"]["pid"] == keeper


def test_another_keeper_takes_the_place_of_a_dead_one(agent: Installation) -> None:
    session, file = waiting(agent, 5)
    keeper = agent.client.node()["keeper"]["pid"]
    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: agent.client.node()["keeper"]["pid"], lambda pid: pid != keeper)
    with agent.keeper() as connection:
        eventually(lambda: [one.name for one in connection.sessions()], lambda names: session["id"] in names)
    assert agent.client.session(session["id"])["pids"] == session["pids"]
    file.touch()
    assert agent.wait_for_state(session["id"], "failed")["exit_status"] == 5
    assert agent.run("true")["name"].startswith("true-")


def test_a_terminal_survives_the_keeper(agent: Installation) -> None:
    session = agent.run("sh", "-c", "read line; echo got $line", io="terminal")
    keeper = agent.client.node()["keeper"]["pid"]
    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: agent.client.node()["keeper"]["pid"], lambda pid: pid != keeper)
    with agent.keeper() as connection:
        eventually(lambda: [one.name for one in connection.sessions()], lambda names: session["id"] in names)
        held = connection.take_fds(session["id"])
    os.write(held["terminal"], b"it\n")
    os.close(held["terminal"])
    assert agent.wait_for_state(session["id"], "ended")["exit_status"] == 0
    assert "got it" in agent.output(session["id"])


def test_agent_and_keeper_may_die_together(agent: Installation) -> None:
    session, file = waiting(agent, 6)
    keeper = agent.client.node()["keeper"]["pid"]
    agent.kill()
    os.kill(keeper, signal.SIGKILL)
    agent.start()
    assert agent.client.session(session["id"])["pids"] == session["pids"]
    file.touch()
    assert agent.wait_for_state(session["id"], "failed")["exit_status"] == 6


def test_a_pid_alone_is_never_believed(agent: Installation) -> None:
    """Another process has the init's pid: the session ended."""
    session = agent.run("sleep", "1000")
    agent.kill()
    with agent.registry() as registry:
        init = registry.session(session["id"]).init
        assert init is not None
        os.kill(init.pid, signal.SIGKILL)
        registry.update_session(session["id"], init=ProcessId(os.getpid(), init.start_time, init.boot_id))
    agent.start()
    assert agent.client.session(session["id"])["state"] == "failed"


def end_of_the_boot(agent: Installation, session: dict[str, Any]) -> None:
    """The registry as it is after the node was restarted."""
    agent.kill()
    os.kill(session["pids"][0], signal.SIGKILL)
    with agent.keeper() as keeper:
        keeper.stop(force=True)
    with agent.registry() as registry:
        init = registry.session(session["id"]).init
        assert init is not None
        registry.update_session(session["id"], init=msgspec.structs.replace(init, boot_id="an-earlier-boot"))


def test_after_a_restart_of_the_node_a_session_is_its_last_checkpoint(agent: Installation) -> None:
    session, file = waiting(agent, 4)
    saved = agent.operate(session["id"], "checkpoint")
    end_of_the_boot(agent, session)
    agent.start()
    found = agent.client.session(session["id"])
    assert found["state"] == "hibernated"
    assert "The node was restarted" in found["error"]["message"]
    assert "is lost" in found["error"]["message"]
    assert saved["id"] in found["error"]["safe"]
    agent.operate(session["id"], "resume")
    file.touch()
    assert agent.wait_for_state(session["id"], "failed")["exit_status"] == 4


def test_after_a_restart_of_the_node_a_session_without_checkpoint_has_failed(agent: Installation) -> None:
    session, _ = waiting(agent, 3)
    end_of_the_boot(agent, session)
    agent.start()
    found = agent.client.session(session["id"])
    assert (found["state"], found["exit_status"]) == ("failed", None)
    assert "no verified checkpoint" in found["error"]["message"]


def test_a_session_that_was_being_launched_is_found_or_given_up(agent: Installation) -> None:
    launched, never = agent.run("sleep", "1000"), agent.run("sleep", "1000")
    agent.kill()
    with agent.registry() as registry:
        init = registry.session(launched["id"]).init
        registry.update_session(launched["id"], state=State.STARTING, init=None)
        registry.update_session(never["id"], state=State.STARTING, init=None)
    with agent.keeper() as keeper:
        keeper.kill(never["id"])
        keeper.forget(never["id"])
    agent.start()
    found = agent.client.session(launched["id"])
    assert (found["state"], found["pids"]) == ("running", launched["pids"])
    assert init is not None
    assert agent.client.session(never["id"])["state"] == "failed"


def test_the_worker_of_a_dead_agent_is_waited_for(agent: Installation) -> None:
    session, file = waiting(agent, 2)
    agent.stop()
    agent.start(TORPOR_PAUSE_AFTER="hibernate:dump")
    operation = begin_paused(agent, session["id"])
    agent.kill()
    agent.start()
    assert agent.client.session(session["id"])["state"] == "hibernating"
    with agent.registry() as registry:
        worker = registry.operation(operation).worker
        assert worker is not None
        assert is_alive(worker)
        os.kill(worker.pid, signal.SIGKILL)
        assert agent.wait_for_state(session["id"], "running")["pids"] == session["pids"]
        assert registry.operation(operation).outcome == "undone"
    file.touch()
    assert agent.wait_for_state(session["id"], "failed")["exit_status"] == 2


def test_an_operation_whose_worker_never_started_is_undone(agent: Installation) -> None:
    session = agent.run("sleep", "1000")
    agent.kill()
    with agent.registry() as registry:
        operation = registry.begin_operation(session["id"], OperationKind.HIBERNATE, ("preflight", "dump"))
        agent.start()
        found = agent.wait_for_state(session["id"], "running")
        assert found["pids"] == session["pids"]
        assert registry.operation(operation.id).outcome == "undone"


def test_a_worker_killed_under_a_live_agent_is_undone_at_once(agent: Installation) -> None:
    session = agent.run("sleep", "1000")
    agent.stop()
    agent.start(TORPOR_PAUSE_AFTER="hibernate:commit")
    operation = begin_paused(agent, session["id"], step="commit")
    with agent.registry() as registry:
        worker = registry.operation(operation).worker
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
    assert agent.wait_for_state(session["id"], "running")["pids"] == session["pids"]
    with pytest.raises(Conflict, match="is running"):
        agent.client.remove(session["id"])
    assert agent.client.remove(session["id"], force=True)["id"] == session["id"]


def begin_paused(agent: Installation, session_id: str, step: str = "dump") -> str:
    """Begins a hibernation that stops after a step; the id of the operation. Nobody listens to it."""
    events = agent.client.operation(session_id, "hibernate")
    next(events)
    events.close()
    with agent.registry() as registry:
        last = eventually(
            lambda: registry.last_operation(session_id), lambda found: found is not None and step in found.done
        )
    assert last is not None
    return last.id


def test_installations_side_by_side_do_not_see_each_other(make_installation: Callable[[], Installation]) -> None:
    first, second = make_installation(), make_installation()
    for installation in (first, second):
        installation.start()
        installation.run("sleep", "1000", name="same")
    assert len(first.client.sessions()) == len(second.client.sessions()) == 1
    assert first.client.node()["keeper"]["pid"] != second.client.node()["keeper"]["pid"]
    first.client.remove("same", force=True)
    assert second.client.session("same")["state"] == "running"
