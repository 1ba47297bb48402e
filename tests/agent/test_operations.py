"""Operations through the agent: who waits for whom, what is refused, what the idle timer and a terminal do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.installation import PYTHON, Installation, eventually

from torpor.errors import Conflict, IntegrityError, TorporError
from torpor.model import State

COUNT = "import itertools, time\nfor i in itertools.count():\n    print(i, flush=True)\n    time.sleep(0.02)"
WHEN_TYPED = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print('got', line.strip(), flush=True)"


def counting(agent: Installation, **facts: Any) -> dict[str, Any]:
    session = agent.run(PYTHON, "-c", COUNT, **facts)
    agent.wait_for_output(session["id"], "3\n")
    return session


def counts_on(agent: Installation, session: dict[str, Any]) -> None:
    """It goes on counting from where it was, without a gap."""
    seen = len(agent.output(session["id"]).split())
    text = eventually(lambda: agent.output(session["id"]), lambda text: len(text.split()) > seen + 3)
    assert text.split() == [str(number) for number in range(len(text.split()))]


def test_a_session_is_hibernated_and_resumed(agent: Installation) -> None:
    session = counting(agent, name="one")
    memory = agent.client.session("one")["rss_bytes"]
    saved = agent.operate("one", "hibernate")
    assert saved.keys() >= {"id", "bytes_logical", "bytes_stored", "bytes_new", "seconds"}
    assert saved["seconds"].keys() >= {"freeze", "transfer", "durable", "verify", "total"}
    away = agent.client.session("one")
    assert (away["state"], away["pids"]) == ("hibernated", [])
    assert not any(Path(f"/proc/{pid}").exists() for pid in session["pids"])
    assert memory > 0
    back = agent.operate("one", "resume")
    assert back["id"] == saved["id"]
    assert back["seconds"].keys() >= {"restore", "answer", "complete", "total"}
    assert agent.client.session("one")["state"] == "running"
    counts_on(agent, session)
    assert agent.operate("one", "resume")["already_running"] is True


def test_progress_comes_before_the_result(agent: Installation) -> None:
    session = counting(agent)
    events = list(agent.client.operation(session["id"], "checkpoint"))
    assert {event["event"] for event in events[:-1]} == {"progress"}
    assert all(event.keys() >= {"phase", "done", "total"} for event in events[:-1])
    assert events[-1]["event"] == "result"
    counts_on(agent, session)


def in_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def undone(agent: Installation, session_id: str) -> None:
    with pytest.raises(TorporError, match="interrupted"):
        agent.operate(session_id, "hibernate")


def test_what_is_asked_meanwhile_is_refused_except_a_resume_which_waits(agent: Installation) -> None:
    session = counting(agent)
    agent.stop()
    agent.start(TORPOR_PAUSE_AFTER="hibernate:preflight")
    begun = in_background(lambda: undone(agent, session["id"]))
    agent.wait_for_state(session["id"], "hibernating")
    for kind in ("checkpoint", "hibernate"):
        with pytest.raises(Conflict, match="in progress"):
            agent.operate(session["id"], kind)
    with pytest.raises(Conflict, match="is hibernating"):
        agent.client.remove(session["id"])
    waiting = agent.client.operation(session["id"], "resume")
    assert next(waiting)["phase"].startswith("waiting")
    with agent.registry() as registry:
        last = registry.last_operation(session["id"])
        assert last is not None
        assert last.worker is not None
        os.kill(last.worker.pid, signal.SIGKILL)
    assert next(waiting)["already_running"] is True
    begun.join(timeout=60)
    counts_on(agent, session)


def test_a_resume_during_a_hibernation_brings_the_session_back(agent: Installation) -> None:
    session = counting(agent)
    hibernation = in_background(lambda: agent.operate(session["id"], "hibernate"))
    agent.wait_for_state(session["id"], "hibernating", "hibernated")
    agent.operate(session["id"], "resume")
    hibernation.join(timeout=60)
    assert agent.client.session(session["id"])["state"] == "running"
    counts_on(agent, session)


def test_two_resumes_at_once_are_one(agent: Installation) -> None:
    session = counting(agent)
    agent.operate(session["id"], "hibernate")
    results: list[dict[str, Any]] = []
    resumes = [in_background(lambda: results.append(agent.operate(session["id"], "resume"))) for _ in "ab"]
    for resume in resumes:
        resume.join(timeout=60)
    assert len({result["id"] for result in results}) == 1
    assert agent.client.session(session["id"])["lease"] == 1
    counts_on(agent, session)


def test_an_operation_goes_on_when_nobody_listens(agent: Installation) -> None:
    session = counting(agent)
    events = agent.client.operation(session["id"], "hibernate")
    next(events)
    events.close()
    agent.wait_for_state(session["id"], "hibernated")


def test_a_session_without_a_checkpoint_is_not_resumed(agent: Installation) -> None:
    session = agent.run("true")
    agent.wait_for_state(session["id"], "ended")
    with pytest.raises(Conflict, match="no verified checkpoint"):
        agent.operate(session["id"], "resume")
    with pytest.raises(Conflict, match="hibernate needs it to be running"):
        agent.operate(session["id"], "hibernate")


def test_a_failed_session_is_brought_back_from_its_checkpoint(agent: Installation) -> None:
    session = counting(agent)
    agent.operate(session["id"], "checkpoint")
    agent.client.signal(session["id"], signal.SIGKILL)
    assert agent.wait_for_state(session["id"], "failed")["exit_status"] == 137
    agent.operate(session["id"], "resume")
    found = agent.client.session(session["id"])
    assert (found["state"], found["exit_status"]) == ("running", None)


def test_the_idle_timer_hibernates_and_says_why(agent: Installation) -> None:
    idle = agent.run("sleep", "1000", idle_after=1.5)
    busy = agent.run(PYTHON, "-c", "while True: pass", idle_after=1.5)
    told = eventually(lambda: agent.client.why(busy["id"]), lambda why: why["verdict"] == "busy")
    assert "of a core" in told["sentence"]
    agent.wait_for_state(idle["id"], "hibernated")
    assert "Hibernated for" in agent.client.why(idle["id"])["sentence"]
    assert agent.client.session(busy["id"])["state"] == "running"
    assert agent.client.session(idle["id"])["last_activity"] >= idle["created"]


def test_a_key_wakes_a_terminal(agent: Installation) -> None:
    session = agent.run(PYTHON, "-c", WHEN_TYPED, io="terminal")
    agent.wait_for_output(session["id"], "ready")
    agent.operate(session["id"], "hibernate")
    with attached(agent, session["id"]) as connection:
        connection.sendall(b"d\0\0\0\6hello\n")
        agent.wait_for_output(session["id"], "got hello")
    assert agent.client.session(session["id"])["state"] == "running"


def attached(agent: Installation, session_id: str) -> Any:
    from torpor.cli.foreground import attach

    return attach(agent.client, {"session": session_id})[0]


def test_a_key_wakes_a_terminal_after_agent_and_keeper_died(agent: Installation) -> None:
    session = agent.run(PYTHON, "-c", WHEN_TYPED, io="terminal")
    agent.wait_for_output(session["id"], "ready")
    agent.operate(session["id"], "hibernate")
    keeper = agent.client.node()["keeper"]["pid"]
    agent.kill()
    os.kill(keeper, signal.SIGKILL)
    agent.start()
    with attached(agent, session["id"]) as connection:
        connection.sendall(b"d\0\0\0\6hello\n")
        agent.wait_for_output(session["id"], "got hello")


def test_a_damaged_checkpoint_is_named_and_loses_its_mark(agent: Installation) -> None:
    session = counting(agent)
    whole = agent.operate(session["id"], "checkpoint")["id"]
    [*_, result] = agent.client.verify(session["id"])
    assert result["checkpoints"] == [whole]
    for pack in (agent.paths.store / "packs").rglob("*"):
        if pack.is_file():
            content = bytearray(pack.read_bytes())
            content[len(content) // 2] ^= 0xFF
            pack.write_bytes(content)
    with pytest.raises(IntegrityError):
        list(agent.client.verify(whole))
    assert agent.client.checkpoints(session["id"])[0]["verified"] is None
    counts_on(agent, session)


class Relay:
    """As little of a relay as the agent can tell from a real one."""

    def __init__(self, agent: Installation, ref: str) -> None:
        self.agent, self.ref = agent, ref

    def says(self, execution_state: str, **facts: Any) -> None:
        now = time.time()
        report = {"execution_state": execution_state, "since": now, "last_message": now, **facts}
        self.agent.client.put_kernel(self.ref, report)

    def quiesces(self, ok: bool, reason: str = "") -> None:
        """Answers the hibernation that begins now."""
        session = self.agent.wait_for_state(self.ref, State.HIBERNATING)
        self.agent.client.quiesced(self.ref, session["version"], ok, reason)


@pytest.fixture
def relay(agent: Installation) -> Relay:
    session = counting(agent, kind="kernel", name="kernel")
    return Relay(agent, session["id"])


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"execution_state": "busy"}, "running a cell"),
        ({"execution_state": "idle", "queued": 2}, "2 of its requests"),
        ({"execution_state": "busy", "waiting_for_input": True}, "waits for input"),
    ],
)
def test_a_busy_kernel_is_not_hibernated(
    agent: Installation, relay: Relay, report: dict[str, Any], reason: str
) -> None:
    relay.says(**report)
    with pytest.raises(Conflict, match=reason):
        agent.operate("kernel", "hibernate")
    assert agent.client.session("kernel")["state"] == "running"
    assert agent.client.session("kernel")["kernel"]["execution_state"] == report["execution_state"]


def test_a_kernel_is_hibernated_when_its_relay_agrees(agent: Installation, relay: Relay) -> None:
    relay.says("idle")
    answering = in_background(lambda: relay.quiesces(True))
    agent.operate("kernel", "hibernate")
    answering.join(timeout=60)
    assert agent.client.session("kernel")["state"] == "hibernated"


def test_a_kernel_goes_on_when_its_relay_objects(agent: Installation, relay: Relay) -> None:
    relay.says("idle")
    answering = in_background(lambda: relay.quiesces(False, "A cell has just been sent."))
    with pytest.raises(Conflict, match="A cell has just been sent"):
        agent.operate("kernel", "hibernate")
    answering.join(timeout=60)
    found = agent.client.session("kernel")
    assert (found["state"], found["error"]["message"]) == ("running", "A cell has just been sent.")


def test_a_kernel_without_a_relay_counts_as_busy(agent: Installation, relay: Relay) -> None:
    told = eventually(lambda: agent.client.why("kernel"), lambda why: "relay" in why["sentence"])
    assert told["verdict"] == "unknown"
    assert relay.ref


def test_a_resume_waits_for_the_kernels_answer(agent: Installation, relay: Relay) -> None:
    relay.says("idle")
    answering = in_background(lambda: relay.quiesces(True))
    agent.operate("kernel", "hibernate")
    answering.join(timeout=60)

    def answers() -> None:
        session = agent.wait_for_state("kernel", "running")
        agent.client.answered("kernel", session["version"])

    answering = in_background(answers)
    agent.operate("kernel", "resume")
    answering.join(timeout=60)
    session = agent.client.session("kernel")
    assert session["answered"] == session["version"]
