"""The relay's side of the handshake before the kernel's process ends: is anything in flight?"""

from __future__ import annotations

import time
from collections.abc import Callable

from torpor.jupyter.held import HeldRequests
from torpor.jupyter.kernel_link import KernelLink
from torpor.jupyter.ledger import Ledger
from torpor.jupyter.timers import Timers

ANSWER_WITHIN = 5.0  # seconds for an idle kernel to answer
COMMS_GRACE = 0.3  # seconds more for the list of comms, which not every kernel knows


class Quiesce:
    """One handshake. The kernel is asked two last questions; its answers show that it listens, and are remembered."""

    def __init__(self, version: int, link: KernelLink, timers: Timers, check: Callable[[], None]) -> None:
        self.version = version
        self.told = False
        self._link = link
        self._timers = timers
        self._check = check
        self._asked = time.monotonic()
        self._answered = 0.0
        link.ask(link.questions, "comm_info_request")
        link.ask(link.questions, "kernel_info_request")
        timers.set("quiesce", COMMS_GRACE if link.side.lossless else ANSWER_WITHIN, check)

    def verdict(self, ledger: Ledger, held: HeldRequests) -> str | None:
        """A sentence why not; empty when nothing is in flight; None when that is not known yet."""
        now = time.monotonic()
        if reason := _in_flight(ledger, held):
            asks = self._link.side.lossless and self._link.is_waiting_for("comm_info_request")
            return None if asks and now < self._asked + COMMS_GRACE else reason
        if self._link.is_waiting_for("kernel_info_request"):
            return None if now < self._asked + ANSWER_WITHIN else "The kernel does not answer."
        if self._link.is_waiting_for("comm_info_request"):
            if not self._answered:
                self._answered = now
                self._timers.set("quiesce", COMMS_GRACE, self._check)
            if now < self._answered + COMMS_GRACE:
                return None
        self._timers.cancel("quiesce")
        return ""


def _in_flight(ledger: Ledger, held: HeldRequests) -> str:
    if ledger.input_for is not None:
        return "A cell waits for input."
    if ledger.in_flight:
        return "The kernel is busy."
    return "A request has just come in." if held.wakes() else ""
