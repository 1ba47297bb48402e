"""Sessions whose memory arrives while they run: what is asked meanwhile, and agents that are killed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.installation import PYTHON, Installation, eventually, is_alive

from torpor.engine.page_bringer import HOLD
from torpor.sessions.resuming import LAZY_FROM

REMEMBER = """
import hashlib, os, sys, time
memory = bytearray(os.urandom(16 << 20))
was = hashlib.sha256(memory).hexdigest()
print("ready", flush=True)
while True:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    os.unlink(sys.argv[1])
    print(hashlib.sha256(memory).hexdigest() == was, flush=True)
"""


class Late:
    """A session that runs while nothing but what it touches arrives."""

    def __init__(self, agent: Installation) -> None:
        self.agent = agent
        self.hold = agent.home / "hold"
        self.ask = agent.home / "ask"
        session = agent.run(PYTHON, "-c", REMEMBER, str(self.ask), name="late")
        self.id: str = session["id"]
        agent.wait_for_output("late", "ready")
        self.arguments = arguments(agent.client.session("late")["pids"])
        agent.operate("late", "hibernate")
        self.hold.touch()
        self.restart()
        self.resuming = threading.Thread(target=agent.torpor, args=("resume", "late"))
        self.resuming.start()
        agent.wait_for_state("late", "running")

    def restart(self, *, kill: bool = False) -> None:
        if kill:
            self.agent.kill()
        else:
            self.agent.stop()
        self.agent.start(**{HOLD: str(self.hold), LAZY_FROM: "0"})

    def operations(self) -> list[tuple[str, str | None]]:
        with self.agent.registry() as registry:
            last = registry.last_operation(self.id)
            assert last is not None
            return [(str(last.kind), last.outcome)]

    def remembers(self) -> None:
        said = self.agent.output("late").count("True")
        self.ask.touch()
        text = eventually(lambda: self.agent.output("late"), lambda text: text.count("e\n") > said)
        assert "False" not in text

    def let_arrive(self) -> None:
        self.hold.unlink()


@pytest.fixture
def late(agent: Installation) -> Iterator[Late]:
    late = Late(agent)
    yield late
    late.hold.unlink(missing_ok=True)
    late.resuming.join()


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[None]:
    """Works meanwhile; afterwards it is done."""
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def arguments(pids: list[int]) -> list[bytes]:
    """What the kernel shows, reading from the processes' memory."""
    return [Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("cmdline", "environ")]


def test_the_kernel_shows_the_arguments_of_a_process_whose_memory_has_not_arrived(late: Late) -> None:
    shown = arguments(late.agent.client.session("late")["pids"])
    late.let_arrive()
    assert shown == late.arguments
    assert all(shown)


@pytest.mark.parametrize(("kind", "state"), [("hibernate", "hibernated"), ("checkpoint", "running")])
def test_what_saves_a_session_waits_until_its_memory_is_there(late: Late, kind: str, state: str) -> None:
    events = late.agent.client.operation("late", kind)
    assert "waiting" in next(events)["phase"]
    assert late.operations() == [("resume", None)]
    late.let_arrive()
    *_, result = events
    assert result["event"] == "result"
    assert late.operations() == [(kind, "completed")]
    assert late.agent.client.session("late")["state"] == state
    if kind == "hibernate":
        late.agent.operate("late", "resume")
    late.remembers()


def test_an_agent_is_killed_while_memory_arrives(late: Late) -> None:
    late.restart(kill=True)
    assert late.operations() == [("resume", None)]
    late.restart(kill=True)
    late.let_arrive()
    eventually(late.operations, lambda seen: seen == [("resume", "completed")])
    late.remembers()
    late.agent.operate("late", "hibernate")
    late.agent.operate("late", "resume")
    late.remembers()


def test_agent_keeper_and_worker_are_killed_while_memory_arrives(late: Late) -> None:
    keeper = late.agent.client.node()["keeper"]["pid"]
    with late.agent.registry() as registry:
        operation = registry.last_operation(late.id)
    assert operation is not None
    assert operation.worker is not None
    late.agent.kill()
    for pid in (keeper, operation.worker.pid):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_alive(operation.worker), lambda lives: not lives)
    late.agent.start(**{HOLD: str(late.hold), LAZY_FROM: "0"})
    late.remembers()
    late.let_arrive()
    eventually(late.operations, lambda seen: seen == [("resume", "completed")])
    late.remembers()
    late.agent.operate("late", "hibernate")


def test_a_session_may_be_ended_while_its_memory_arrives(late: Late) -> None:
    init = late.agent.client.session("late")["pids"][0]
    with in_background(lambda: late.agent.client.end("late", keep=True)):
        eventually(lambda: Path(f"/proc/{init}").exists(), lambda exists: not exists)
        late.let_arrive()
    assert late.agent.client.session("late")["state"] == "ended"
    assert late.agent.client.session("late")["error"] is None
