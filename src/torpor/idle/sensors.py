"""The sensors: the only part of this package that touches the machine.

How a tree's CPU time is read belongs to the layer that knows processes, so it is passed in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from torpor.idle.facts import CpuSample, TerminalUse
from torpor.model import ProcessId


class CpuMeter:
    """Keeps the CPU samples of every session's present tree.

    `read` gives the CPU seconds of the tree below an init, or None when that init is not there any more. Recent
    samples are kept as they come, older ones four per `window` seconds, and none older than `horizon` seconds.
    """

    def __init__(
        self,
        read: Callable[[ProcessId], float | None],
        *,
        window: float = 60.0,
        horizon: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._read = read
        self._window = window
        self._horizon = horizon
        self._clock = clock
        self._kept: dict[str, tuple[ProcessId, list[CpuSample]]] = {}

    def sample(self, session: str, init: ProcessId, *, idle_after: float = 0.0) -> tuple[CpuSample, ...]:
        """Reads the tree once more and gives all its samples, oldest first; samples of an earlier init are dropped.

        Samples cover at least `idle_after` seconds once they have had the time to. A reading that fails adds nothing:
        the samples grow stale, which counts as busy.
        """
        known, samples = self._kept.get(session, (init, []))
        if known != init:
            samples = []
        seconds = self._read(init)
        if seconds is not None:
            samples = [*samples, CpuSample(self._clock(), seconds)]
            samples = _thinned(samples, self._window, max(self._horizon, idle_after + 2 * self._window))
        self._kept[session] = (init, samples)
        return tuple(samples)

    def forget(self, session: str) -> None:
        """Drops a session's samples: it ended, or it is away."""
        self._kept.pop(session, None)


def terminal_use(path: str, *, clock: Callable[[], float] = time.time) -> TerminalUse | None:
    """Last use of the terminal at `path` (a pseudo-terminal's slave): a key that was read or a line that was printed.

    The kernel keeps these times to about eight seconds. None when the terminal is not there.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return TerminalUse(last_use=max(status.st_atime, status.st_mtime), read=clock())


def _thinned(samples: list[CpuSample], window: float, horizon: float) -> list[CpuSample]:
    newest = samples[-1].at
    kept: list[CpuSample] = []
    for sample in samples:
        age = newest - sample.at
        crowded = age > 2 * window and kept and sample.at - kept[-1].at < window / 4
        if age <= horizon and not crowded:
            kept.append(sample)
    return kept
