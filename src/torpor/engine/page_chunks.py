"""Chunks from the store for a session that runs already: while one cannot be read, the session stands still."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence

from torpor.engine import page_log, procfs
from torpor.engine.page_log import PageLog
from torpor.engine.restore import Read
from torpor.errors import TorporError

TRIES, TRY_AGAIN_AFTER = 5, 0.4  # seconds


class Chunks:
    """To be used by several threads. `read` authenticates; `init` is (pid, start time) of the session, once it runs.

    `stopped` are the processes that this, or an earlier server, has stopped; `loss` is a sentence when a chunk is lost.
    """

    read: Read

    def __init__(self, log: PageLog, news: int, stopping: threading.Event) -> None:
        """`news` is an eventfd that is written when a chunk is lost; nothing is tried any more once `stopping`."""
        self.init: tuple[int, int] | None = None
        self.stopped: list[tuple[int, int]] = []
        self.loss = ""
        self._log, self._news, self._stopping = log, news, stopping
        self._trouble = threading.Lock()

    def fetch(self, ids: Sequence[bytes], content: memoryview, sizes: Sequence[int]) -> bool:
        """Reads chunks; False when they are lost, or this server ends."""
        try:
            self.read(ids, content, sizes)
        except (TorporError, OSError) as failure:
            return self._fetch_again(ids, content, sizes, failure)
        return True

    def go_on(self) -> None:
        """Lets the session run again."""
        for pid, started in self.stopped:
            send_signal(pid, started, signal.SIGCONT)
        self.stopped.clear()
        self._log.add(0, page_log.CONTINUED)

    def _fetch_again(
        self, ids: Sequence[bytes], content: memoryview, sizes: Sequence[int], failure: TorporError | OSError
    ) -> bool:
        with self._trouble:
            self._stand_still()
            for _ in range(TRIES):
                if self.loss or self._stopping.wait(TRY_AGAIN_AFTER):
                    return False
                try:
                    self.read(ids, content, sizes)
                except (TorporError, OSError) as again:
                    failure = again
                    continue
                self.go_on()
                return True
            self.loss = failure.message if isinstance(failure, TorporError) else f"The store cannot be read: {failure}."
            os.eventfd_write(self._news, 1)
            return False

    def _stand_still(self) -> None:
        """Stops every process of the session that is not stopped already, its first one first."""
        if self.init is None:
            return
        for pid in procfs.tree(self.init[0]):
            started = procfs.start_time(pid)
            if started is not None and not procfs.stopped(pid):
                self._log.add(0, page_log.STOPPED, pid, started)
                self.stopped.append((pid, started))
                send_signal(pid, started, signal.SIGSTOP)


def send_signal(pid: int, start_time: int, signum: int) -> None:
    """Signals exactly this process; one that is gone is left alone."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if procfs.start_time(pid) == start_time:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)
