"""Named deadlines of a loop in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable


class Timers:
    """Each name has at most one deadline. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, delay: float, act: Callable[[], None]) -> None:
        """Runs `act` in `delay` seconds, instead of what this name stood for."""
        self._due[name] = (time.monotonic() + delay, act)

    def set_if_unset(self, name: str, delay: float, act: Callable[[], None]) -> None:
        """Runs `act` in `delay` seconds, unless this name has a deadline."""
        if name not in self._due:
            self.set(name, delay, act)

    def cancel(self, name: str) -> None:
        """Forgets this name's deadline, if it has one."""
        self._due.pop(name, None)

    def milliseconds(self) -> int | None:
        """Until the next deadline, rounded up; None = there is none."""
        if not self._due:
            return None
        return max(0, int(1000 * (min(when for when, _ in self._due.values()) - time.monotonic())) + 1)

    def run_due(self) -> None:
        """Runs what is due; each may set new deadlines."""
        if not self._due:
            return
        now = time.monotonic()
        for name in [name for name, (when, _) in self._due.items() if when <= now]:
            entry = self._due.pop(name, None)
            if entry:
                entry[1]()
