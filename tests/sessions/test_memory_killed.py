"""Whoever brings memory is killed at random moments while it arrives: every byte is right in the end."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.sessions.arrival import serving
from tests.sessions.stage import Stage, eventually

from torpor.engine.page_source import GUARDIAN_NAME, SERVER_NAME
from torpor.model import OperationKind, Session, State
from torpor.sessions import resuming

BLOCKS = """
import hashlib, os, random, sys, threading, time
block, count, folder = 64 << 10, int(sys.argv[1]), sys.argv[2]
memory = bytearray(count * block)
for number in range(count):
    memory[number * block:(number + 1) * block] = os.urandom(block)
right = [hashlib.blake2b(memory[number * block:(number + 1) * block]).digest() for number in range(count)]
wrong = []
def look(numbers):
    view = memoryview(memory)
    for number in numbers:
        if hashlib.blake2b(view[number * block:(number + 1) * block]).digest() != right[number]:
            wrong.append(number)
print("ready", flush=True)
while not os.path.exists(folder + "/go"):
    time.sleep(0.005)
threads = [threading.Thread(target=look, args=(random.sample(range(count), count // 4),)) for _ in range(3)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print("touched", wrong, flush=True)
while not os.path.exists(folder + "/check"):
    time.sleep(0.005)
look(range(count))
print("checked", wrong, flush=True)
time.sleep(1000)
"""
SIZE = 192 << 20
AT_MOST = 12  # kills


class Victims:
    """Everybody who takes part while memory arrives; at least one of the two who hold it lives."""

    def __init__(self, stage: Stage, session: Session, threads: ThreadPoolExecutor) -> None:
        self._stage, self._threads = stage, threads
        self._worker = stage.begin(session, OperationKind.RESUME, **{resuming.LAZY_FROM: "0"})
        self.operation = self._worker.operation
        self.recovery: Future[Session] | None = None
        eventually(lambda: stage.session(session).state, lambda state: state is State.RUNNING)

    def kill(self, chosen: str) -> None:
        """kill -9 to one, if it is still there."""
        if chosen == "keeper":
            self._stage.kill_keeper()
        elif chosen == "worker" and self.recovery is None:
            self._worker.kill()
            if self._stage.registry.operation(self.operation.id).ended is None:
                self.recovery = self._threads.submit(self._stage.recover, self.operation)
        elif self._whole():
            for pid in serving(self._stage, chosen)[:1]:
                os.kill(pid, signal.SIGKILL)

    def ended(self) -> bool:
        """Whether everything has arrived."""
        return self._stage.registry.operation(self.operation.id).ended is not None

    def _whole(self) -> bool:
        """Waits until both hold the memory again; False when they have ended."""
        seen = eventually(
            lambda: (self.ended(), *(len(serving(self._stage, name)) for name in (SERVER_NAME, GUARDIAN_NAME))),
            lambda seen: seen[0] or seen[1:] == (1, 1) or seen[1:] == (0, 0),
        )
        return seen == (False, 1, 1)


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_is_right_whoever_is_killed(stage: Stage, seed: int) -> None:
    chosen = random.Random(seed)
    session = stage.start(BLOCKS, str(SIZE >> 16), str(stage.home))
    stage.wait_for_output(session, lambda lines: "ready" in lines)
    stage.run(session, OperationKind.HIBERNATE)
    with ThreadPoolExecutor(1) as threads:
        victims = Victims(stage, stage.session(session), threads)
        (stage.home / "go").touch()
        for _ in range(AT_MOST):
            if victims.ended():
                break
            threading.Event().wait(chosen.uniform(0, 0.15))  # at any moment
            victims.kill(chosen.choice([SERVER_NAME] * 4 + [GUARDIAN_NAME] * 4 + ["worker", "keeper"]))
        if victims.recovery is not None:
            victims.recovery.result()
        eventually(victims.ended, bool)
    operation = stage.registry.operation(victims.operation.id)
    assert operation.outcome == "completed", operation.error
    assert stage.session(session).state is State.RUNNING
    (stage.home / "check").touch()
    lines = stage.wait_for_output(session, lambda lines: any(line.startswith("checked") for line in lines))
    assert lines == ["ready", "touched []", "checked []"]
