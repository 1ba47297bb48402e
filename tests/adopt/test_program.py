"""A plain program that was started in a shell becomes a session, and comes back again and again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adopt.programs import PYTHON, Program, occupied
from tests.installation import Installation, eventually

from torpor.engine import procfs

COUNTER = """
import hashlib, mmap, os, signal, subprocess, sys, threading, time
open("/dev/shm/" + sys.argv[1], "wb").write(b"shared" * 1000)
shared = open("/dev/shm/" + sys.argv[1], "r+b")
mapped = mmap.mmap(shared.fileno(), 0)
data = os.urandom(8 << 20)
digest = hashlib.sha256(data).hexdigest()
child = subprocess.Popen(["/bin/sh", "-c", "while :; do sleep 0.1; done"])
threading.Thread(target=lambda: [time.sleep(0.1) for _ in iter(int, 1)], daemon=True).start()
signal.signal(signal.SIGUSR1, lambda *_: print("signalled", flush=True))
identity = os.getpid(), child.pid
count = 0
while True:
    count += 1
    whole = hashlib.sha256(data).hexdigest() == digest and mapped[:6] == b"shared"
    known = os.path.exists("/dev/shm/" + sys.argv[1]) and child.poll() is None
    print(count, whole and known and (os.getpid(), child.pid) == identity, flush=True)
    time.sleep(0.05)
"""

Start = Callable[..., Program]


def counted(program: Program) -> list[str]:
    """Its lines, which must be 1, 2, 3…, each with everything as it was."""
    lines = [line for line in program.output if line != "signalled"]
    assert lines == [f"{number} True" for number in range(1, len(lines) + 1)], lines[-5:]
    return lines


def goes_on(program: Program, more: int = 4) -> None:
    before = len(counted(program))
    eventually(lambda: len(counted(program)), lambda now: now >= before + more)


@pytest.mark.parametrize("own_session", [True, False], ids=["leader of its session", "job of a shell"])
def test_a_program_comes_back_three_times(agent: Installation, start: Start, own_session: bool) -> None:
    name = f"torpor-test-{agent.home.name}"
    program = start(PYTHON, "-I", "-S", "-c", COUNTER, name, own_session=own_session)
    goes_on(program)
    session = agent.client.adopt(program.pid, name="count")
    assert (session["state"], session["outside"], session["init"]["pid"]) == ("running", True, program.pid)
    goes_on(program)
    with contextlib.ExitStack() as held:
        comes_back_three_times(agent, program, held, name)
    agent.client.signal("count", signal.SIGUSR1)
    program.printed("signalled")
    assert agent.client.end("count", keep=False)["state"] == "ended"


def comes_back_three_times(agent: Installation, program: Program, held: contextlib.ExitStack, name: str) -> None:
    occupant = None
    for _ in range(3):
        agent.operate("count", "hibernate")
        assert agent.client.session("count")["pids"] == []
        if occupant is None:
            assert program.process.wait() == -signal.SIGKILL
            assert not Path("/dev/shm", name).exists()
            occupant = held.enter_context(occupied(program.pid))
        agent.operate("count", "resume")
        goes_on(program)
        resumed = agent.client.session("count")
        assert (resumed["state"], resumed["outside"]) == ("running", False)
        assert [procfs.nspid(pid) for pid in resumed["pids"][:2]] == [1, program.pid]
        assert occupant.poll() is None
