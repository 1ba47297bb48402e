"""Which steps a transition has, and what the world means when it stopped half-way: pure functions.

The order of the steps is the safety of the sessions. A session's process is ended (`end`) only after its
checkpoint is durable (`commit`) and was read back (`verify`); a resumed one runs (`run`) only after it is on
record (`restore`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from torpor.model import OperationKind, Session

CHECKPOINT_STEPS = ("preflight", "dump", "seal", "commit", "verify", "record")
HIBERNATE_STEPS = ("quiesce", "preflight", "dump", "seal", "commit", "verify", "end", "record")
RESUME_STEPS = ("lease", "compatibility", "lay_out", "restore", "run", "answer", "complete", "record")


class Outcome(StrEnum):
    """What has become of a transition whose worker died."""

    RUNNING_UNDONE = "running, as before"
    RUNNING_COMPLETED = "running, transition completed"
    HIBERNATED_COMPLETED = "hibernated, transition completed"
    AWAY_UNDONE = "not running, as before"
    DIED = "the session died by itself meanwhile"
    LOST = "ended, because a part of its memory could not be had"


@dataclass(frozen=True)
class Remains:
    """What is left after a worker died and CRIU has ended.

    `init_alive`: the session's first process lives (for a resume: the one that the worker put on record).
    `committed`: the operation's manifest is in the store, and whole. `verified`: every byte of it was read back.
    `memory_lost`: the page source of a resume could not bring everything, and ended the session.
    """

    init_alive: bool
    committed: bool = False
    verified: bool = False
    memory_lost: bool = False


def steps(kind: OperationKind, session: Session) -> tuple[str, ...]:
    """The steps of a transition of this session, in order. Only kernels have somebody to quiesce."""
    if kind is OperationKind.CHECKPOINT:
        return CHECKPOINT_STEPS
    if kind is OperationKind.RESUME:
        return RESUME_STEPS
    return HIBERNATE_STEPS if session.kind == "kernel" else HIBERNATE_STEPS[1:]


def outcome(kind: OperationKind, done: Collection[str], remains: Remains) -> Outcome:
    """What a transition that stopped after the steps in `done` has come to. Never loses a session.

    A tree is killed as a whole (its init first), so a living init means a whole session.
    """
    if kind is OperationKind.RESUME:
        if "restore" not in done:
            return Outcome.AWAY_UNDONE
        if remains.memory_lost and "run" in done:
            return Outcome.LOST
        return Outcome.RUNNING_COMPLETED if remains.init_alive else Outcome.AWAY_UNDONE
    safe = remains.committed and (remains.verified or "verify" in done)
    if remains.init_alive:
        return Outcome.RUNNING_COMPLETED if safe and kind is OperationKind.CHECKPOINT else Outcome.RUNNING_UNDONE
    if safe and kind is OperationKind.HIBERNATE and "verify" in done:
        return Outcome.HIBERNATED_COMPLETED
    return Outcome.DIED
