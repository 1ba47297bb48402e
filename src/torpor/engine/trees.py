"""Ending a process together with everything below it."""

from __future__ import annotations

import contextlib
import os
import signal

from torpor.engine import procfs


def end(root: int) -> None:
    """kill -9 to a process and all its descendants, which are stopped first, so that none starts another meanwhile."""
    stopped: list[int] = []
    while news := [pid for pid in procfs.tree(root) if pid not in stopped]:
        for pid in news:
            _signal(pid, signal.SIGSTOP)
        stopped += news
    for pid in reversed(stopped):
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
