"""What is known of one session at one moment, each reading with the time it was taken.

A reading that is missing is None (or an empty tuple); one that is too old is stale. Both mean unknown, and unknown
counts as busy: nothing here has a default that could pass for "nothing happens".
"""

from __future__ import annotations

import msgspec

from torpor.model import Kernel


class CpuSample(msgspec.Struct, frozen=True):
    """CPU time that the session's tree has used so far, waited-for children included: `seconds`, read `at`."""

    at: float
    seconds: float


class TerminalUse(msgspec.Struct, frozen=True):
    """When somebody last typed at the session's terminal or something was printed there, and when that was `read`."""

    last_use: float
    read: float


class Facts(msgspec.Struct, frozen=True):
    """Everything that the verdict may look at. Times are seconds since the epoch.

    `kernel` is what the relay last said; its `heard` must be renewed while the relay lives, else the reading goes
    stale. `cpu` holds samples of the present tree only, oldest first. `idle_after` is the session's own limit in
    seconds, None for the policy's. `last_refusal` is when this policy's action last failed or was refused.
    """

    now: float
    started: float
    kind: str = "command"
    kernel: Kernel | None = None
    cpu: tuple[CpuSample, ...] = ()
    has_terminal: bool = False
    terminal: TerminalUse | None = None
    last_resume: float | None = None
    last_refusal: float | None = None
    idle_after: float | None = None

    @property
    def wakes_by_itself(self) -> bool:
        """Whether its user's next step (a cell, a key) wakes the session."""
        return self.kind == "kernel" or self.has_terminal
