"""Freezing a session and streaming it out. Whatever goes wrong, the session goes on running.

CRIU holds the frozen tree at its "post-dump" question until we answer: that is where a hibernation commits
and verifies. When the process that runs this dies, the question fails and CRIU lets the tree go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torpor.engine import filetree, images, procfs, surroundings
from torpor.engine.criu import CriuRun
from torpor.engine.criu_binary import Criu
from torpor.engine.pagestream import SEGMENT, Mappings, PageObject, PageReceiver, Put, SegmentPool
from torpor.errors import EngineError
from torpor.model import ProcessId

SOCKET_BUFFER = 4 << 20
SHARED_MEMORY = "mnt[/dev/shm]:shm"
ARGUMENTS = (
    *("--tcp-close", "--skip-in-flight", "--ext-unix-sk", "--file-locks", "--link-remap"),
    *("--ghost-limit", "1024G", "--manage-cgroups=ignore"),
    *("--external", "mnt[]:m", "--external", SHARED_MEMORY),
)


class Dump:
    """One dump of the tree below `init` into `put`.

    Call `stream` (returns with the tree frozen and everything received), then exactly one of `let_go` and
    `end_tree`; `stored` waits for the chunk ids and may come before or after. `undo` is for any failure.
    """

    def __init__(
        self,
        criu: Criu,
        init: ProcessId,
        folder: Path,
        put: Put,
        pool: SegmentPool,
        *,
        leave_running: bool,
        deadline: float,
        extra: Sequence[str] = (),
        note: Callable[[ProcessId], None] = lambda _: None,
        user: tuple[int, int] = (0, 0),
        outside: bool = False,
    ) -> None:
        """`folder` is private scratch in memory; `extra` are further CRIU arguments (terminals).

        `user` owns the tree (uid, gid). `outside`: the tree runs in the node's own namespaces, which must not become
        part of the images, so that they can be restored in fresh ones: CRIU is started in its mount namespace.
        """
        self._outside = outside
        self._init = init
        self._folder = folder
        self._put = put
        self._pool = pool
        self._pids: dict[int, int] = {}
        self._ours, theirs = socket.socketpair()
        for end in (self._ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self._pidfd = os.pidfd_open(init.pid)
        if procfs.start_time(init.pid) != init.start_time:
            raise EngineError("The session's first process has gone; there is nothing to save.")
        self.receiver = PageReceiver(self._ours, put, self._mappings_of, pool, store_later=leave_running)
        self.started = time.monotonic()
        self._run = CriuRun(
            criu,
            "dump",
            [
                *("--tree", str(init.pid), "--page-server", "--ps-socket", str(theirs.fileno())),
                *(("--leave-running",) if leave_running else ()),
                *ARGUMENTS,
                *(("--shell-job",) if outside else ()),
                *extra,
            ],
            folder,
            deadline=deadline,
            pass_fds=(theirs.fileno(),),
            note=note,
            user=user,
            inside=("nsenter", "--target", str(init.pid), "--mount", "--") if outside else (),
            seen_as=Path(f"/proc/{os.getpid()}/root{folder}") if outside else None,
        )
        self._run.at_deadline = self._hang_up
        theirs.close()

    def stream(self) -> filetree.SavedTree:
        """Receives all memory, then the content of the session's /dev/shm. The tree stays frozen.

        Raises EngineError when CRIU refuses or misses its deadline, or whatever `put` raised; the tree then runs.
        """
        try:
            self.receiver.receive()
            self._run.wait_for("post-dump")
            return self._save_shared_memory()
        except (EngineError, ConnectionError):
            self._ours.close()
            self._run.wait()
            raise self._run.failure() from None

    def stored(self) -> list[PageObject]:
        """The received memory with its chunk ids, once all of it has been handed to the store."""
        return self.receiver.finish()

    def let_go(self) -> float:
        """Lets the tree run on (after a checkpoint); returns the seconds that it was frozen. Raises EngineError."""
        self._run.answer(go_on=True)
        if self._run.wait() != 0:
            raise self._run.failure()
        return images.frozen_seconds(self._folder)

    def require_frozen(self) -> None:
        """Raises EngineError when CRIU is gone: the tree runs on, and what was saved of it is out of date."""
        if not self._run.still_asks():
            self._run.wait()
            raise self._run.failure()

    def end_tree(self, others: Sequence[ProcessId] = ()) -> None:
        """Ends the frozen tree at once and completely: its init is killed, and with it the whole namespace.

        A tree in the node's own namespaces has `others` beside its first process, which do not die with that.
        """
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        for process in others:
            procfs.kill(process)
        self._run.answer(go_on=True)
        self._run.wait()

    def undo(self, keep_log: Path | None = None) -> None:
        """After a failure: lets the tree run on as before and waits until CRIU has ended."""
        self._ours.close()
        self._run.answer(go_on=False)
        self._run.wait()
        if keep_log is not None:
            self._run.keep_log(keep_log)

    def _hang_up(self) -> None:
        """Nobody sends any more, whoever may still hold the other end."""
        with contextlib.suppress(OSError):  # it is closed already
            self._ours.shutdown(socket.SHUT_RDWR)

    def _save_shared_memory(self) -> filetree.SavedTree:
        segment = self._pool.take()
        try:
            only = surroundings.shared_memory_files(self._init.pid) if self._outside else None
            root = Path(f"/proc/{self._init.pid}/root/dev/shm")
            return filetree.save(root, self._put, segment[:SEGMENT], only=only)
        finally:
            self._pool.give(segment)

    def _mappings_of(self, image_id: int) -> Mappings:
        """Mappings of a frozen task; CRIU names tasks by their pid inside the session."""
        if image_id not in self._pids:
            self._pids = {procfs.nspid(pid): pid for pid in procfs.tree(self._init.pid)}
        if image_id not in self._pids:
            raise EngineError(f"CRIU sent the memory of process {image_id}, which is not in the session.")
        mappings = []
        with open(f"/proc/{self._pids[image_id]}/maps") as lines:
            for line in lines:
                start, _, end = line.split(" ", 1)[0].partition("-")
                mappings.append((int(start, 16), int(end, 16)))
        return mappings
