"""Tells the agent what the kernel does: on every change, and often enough for its silence to mean something."""

from __future__ import annotations

import time
from collections.abc import Callable

from torpor.jupyter.agent_link import AgentLink
from torpor.jupyter.timers import Timers
from torpor.model import Kernel

EVERY = 4.0  # seconds between reports when nothing changes
SELDOM = 60.0  # the same while the kernel is away
NOT_WITHIN = 0.05  # seconds between reports of a kernel whose state changes all the time


class Reporter:
    """Reports through the agent link. `away` tells that the kernel's process is not there."""

    def __init__(self, agent: AgentLink, timers: Timers, facts: Callable[[], Kernel]) -> None:
        self.away = False
        self._agent = agent
        self._timers = timers
        self._facts = facts
        self._told: Kernel | None = None
        self._when = 0.0

    def tell(self) -> None:
        """Reports if there is something to say; cheap to call after every message."""
        facts = self._facts()
        age = time.monotonic() - self._when
        if facts == self._told and age < (SELDOM if self.away else EVERY):
            self._timers.set_if_unset("report", (SELDOM if self.away else EVERY) - age, self.tell)
        elif age < NOT_WITHIN:
            self._timers.set_if_unset("report soon", NOT_WITHIN - age, self.tell)
        else:
            self._told, self._when = facts, time.monotonic()
            self._agent.report(facts)
