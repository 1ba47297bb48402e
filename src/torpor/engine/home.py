"""Namespaces of its own for a tree that was not started in any: made before CRIU restores the tree into them.

The images of an adopted tree hold no namespaces. So the launcher makes those of an ordinary session, with an init
that starts nothing; CRIU is started inside; what it restores becomes that init's child as soon as CRIU has ended.
From then on the session is like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from torpor.engine import images, keeper_launch, keeper_wire, procfs
from torpor.errors import EngineError, NotFound
from torpor.model import Caller, ProcessId

PATIENCE = 60.0  # seconds until an init that does not answer counts as failed
GAP = 256  # process numbers in a row that CRIU and its helpers get, and that nothing of the tree has
PIPE_PIECE = 1 << 16


class Home:
    """New pid, mount, IPC and time namespaces whose init waits for the tree.

    The init lives only as long as its lifeline: when this process dies before `settle`, or at `end`, the kernel ends
    everything in the namespaces.
    """

    def __init__(self, folder: Path, caller: Caller, images_folder: Path, python: str) -> None:
        """`folder` is the session's own; `images_folder` holds the tree's images. Raises EngineError.

        Its clocks go on from where the tree's stood, which CRIU would see to in a namespace for the tree alone: the
        image that asks CRIU for that is removed.
        """
        processes = (images_folder / images.PROCESSES).read_bytes()
        clocks = images_folder / images.CLOCKS
        command = images.root_pid(processes)
        launch = {"argv": [str(command)], "cwd": "/", "env": {}, "io": "streams"}
        spec = {
            "launch": launch,
            "caller": msgspec.to_builtins(caller),
            "folder": str(folder),
            "adopt": True,
            "last_pid": free_numbers(images.process_ids(processes)),
            "clocks": images.clocks(clocks.read_bytes()),
        }
        self._report, report = os.pipe2(os.O_CLOEXEC)
        identity, identity_write = os.pipe2(os.O_CLOEXEC)
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        memory = keeper_wire.memory_file(json.dumps(spec).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        given = [memory, identity_write, report]
        try:
            launcher = keeper_launch.spawn_launcher(python, given, lifeline)
        finally:
            keeper_wire.close_all([*given, lifeline])
        try:
            pid, started = keeper_launch.read_identity(self._read(identity, b""))
            said = self._read(self._report, b'"ready"')
        finally:
            os.close(identity)
            os.waitpid(launcher, 0)
        _, error = keeper_launch.read_report(said)
        if error is not None or not pid:
            self.end()
            raise EngineError(error or "The session's namespaces cannot be made.")
        clocks.unlink()
        self.init = ProcessId(pid, started, procfs.boot_id())

    @property
    def enter(self) -> tuple[str, ...]:
        """Command prefix that starts a command inside."""
        return ("nsenter", "--target", str(self.init.pid), "--mount", "--pid", "--ipc", "--time", "--")

    @property
    def shared_memory(self) -> Path:
        """Its /dev/shm, seen from outside."""
        return Path(f"/proc/{self.init.pid}/root/dev/shm")

    def member(self, number: int, among: Iterable[int]) -> int:
        """The pid on the node of the process that has this number inside. Raises EngineError when it is gone."""
        inside = procfs.namespaces(self.init.pid)["pid"]
        for pid in among:
            with contextlib.suppress(NotFound):
                if procfs.nspid(pid) == number and procfs.namespaces(pid)["pid"] == inside:
                    return pid
        raise EngineError("The restored session ended before it ran.")

    def settle(self, scratch: Path) -> None:
        """The tree is there and is to stay: nothing of this process is left in it. Raises EngineError."""
        done = subprocess.run(
            [*self.enter, "umount", "--lazy", str(scratch)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        if done.returncode != 0:
            raise EngineError(f"The session's namespaces cannot be cleaned up: {done.stderr.strip()}.")
        os.write(self._lifeline, b"!")
        self._read(self._report, b"")
        self._close()

    def end(self) -> None:
        """Ends the init and everything in its namespaces, unless it has settled."""
        self._close()

    def _close(self) -> None:
        for fd in (self._lifeline, self._report):
            if fd >= 0:
                os.close(fd)
        self._lifeline = self._report = -1

    def _read(self, fd: int, until: bytes) -> bytes:
        """What comes from a pipe, to its end or until these bytes have come."""
        deadline = time.monotonic() + PATIENCE
        said = b""
        while not (until and until in said):
            ready, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise EngineError(f"The session's namespaces were not there within {PATIENCE:.0f} s.")
            piece = os.read(fd, PIPE_PIECE)
            if not piece:
                break
            said += piece
        return said


def free_numbers(taken: set[int]) -> int:
    """The process number after which GAP numbers in a row are free."""
    start = GAP
    for number in sorted(taken):
        if start < number <= start + GAP:
            start = number
    return start
