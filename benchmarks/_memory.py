"""Sessions full of random memory that answer on a socket, on a Torpor of their own without an agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.sessions.stage import Stage  # the tests' own way to start real workers without an agent

from torpor.engine import procfs
from torpor.model import OperationKind, Session

SOURCE = """
import os, socket, sys
size = int(sys.argv[1])
data = bytearray(size)
step = 1 << 20
for start in range(0, size, step):
    data[start:start + step] = os.urandom(min(step, size - start))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    asking, _ = listener.accept()
    step = int.from_bytes(asking.recv(8), "little")
    asking.sendall(sum(data[::step]).to_bytes(8, "little"))
    asking.close()
"""
FILL = """
import mmap, sys, time
size, piece = int(sys.argv[1]), b"x" * (1 << 20)
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
started = time.monotonic()
for start in range(0, size, 1 << 20):
    memory[start:start + (1 << 20)] = piece
print(time.monotonic() - started)
"""
PATIENCE = 120.0
FILLED_WITHIN = 600.0  # random bytes come slowly
EVERYWHERE = 4096  # touches every page
HARDLY = 1 << 62  # touches one


class Memory:
    """One session with `size` bytes of random memory. It answers every connection with a sum over a part of it."""

    def __init__(self, stage: Stage, size: int) -> None:
        self._stage = stage
        self.session: Session = stage.start(SOURCE, str(size))
        self.port = self._filled()
        self.sum = self.answer()

    def _filled(self) -> int:
        """The port where it answers, once its memory is filled."""
        deadline = time.monotonic() + FILLED_WITHIN
        while not (said := self._stage.output(self.session)):
            assert time.monotonic() < deadline, "the session does not fill its memory"
            time.sleep(0.02)
        return int(said[0])

    @property
    def pid(self) -> int:
        """The session's init on the node."""
        init = self._stage.session(self.session).init
        assert init is not None
        return init.pid

    @property
    def folder(self) -> Path:
        """Where to put a peer's files: on the store's disk, removed with the session."""
        return self._stage.home / "peer"

    def answer(self, step: int = EVERYWHERE) -> int:
        """Waits until the session answers; the sum of every `step`th byte of its memory."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", self.port)) as asking:
                asking.sendall(step.to_bytes(8, "little"))
                said = asking.recv(8)
                if said:
                    return int.from_bytes(said, "little")
            assert time.monotonic() < deadline, "the session does not answer"
            time.sleep(0.001)

    def operate(self, kind: OperationKind) -> tuple[float, dict[str, Any]]:
        """Runs one operation: its seconds from the start of its worker to its end, and its result."""
        started = time.monotonic()
        worker = self._stage.begin(self._stage.session(self.session), kind)
        try:
            worker.wait()
        except BaseException:  # interrupted: what it does must not outlive the stage
            signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            raise
        seconds = time.monotonic() - started
        operation = self._stage.registry.operation(worker.operation.id)
        assert operation.result is not None, operation.error
        return seconds, operation.result


@contextlib.contextmanager
def a_session(size: int) -> Iterator[Memory]:
    """A new session in a new Torpor with an empty store; nothing is left afterwards."""
    stage = Stage()
    try:
        yield Memory(stage, size)
    finally:
        stage.close()


def end_tree(pid: int) -> None:
    """Kills an init, and with it its namespace, and waits until its memory is free."""
    started = procfs.start_time(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while started is not None and procfs.alive(pid, started, procfs.boot_id()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fill(size: int) -> float:
    """Seconds that a new process takes to fill `size` bytes of fresh memory: no resume can be faster."""
    done = subprocess.run([sys.executable, "-c", FILL, str(size)], check=True, capture_output=True, text=True)
    return float(done.stdout)
