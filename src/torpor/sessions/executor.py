"""Carrying out a plan step by step, with every step on record, and undoing it when something fails."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torpor.engine.criu_binary import Criu
from torpor.engine.keeper_client import KeeperClient
from torpor.errors import EngineError, StoreError, TorporError, UsageError
from torpor.model import Operation, OperationKind, ProcessId, Session, State
from torpor.paths import Paths
from torpor.sessions.registry import Registry
from torpor.store import Store

logger = logging.getLogger(__name__)

PAUSE_AFTER = "TORPOR_PAUSE_AFTER"  # for tests: "hibernate:commit" stops the worker after that step until SIGUSR1

LEAST_DEADLINE = "TORPOR_LEAST_DEADLINE"  # seconds that CRIU may always take; 60 unless set
SLOWEST_BYTES = 20 << 20  # CRIU moving fewer bytes a second than this is taken for hung

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all (0: not known)


@dataclass
class Context:
    """Everything that a transition works with. `scratch` is private memory that vanishes with the worker."""

    paths: Paths
    registry: Registry
    store: Store
    criu: Criu
    operation: Operation
    session: Session
    scratch: Path
    progress: Progress

    def note(self, *processes: ProcessId) -> None:
        """Adds to the processes that have to be gone before the operation can be recovered."""
        noted = self.registry.operation(self.operation.id).processes
        self.registry.note_processes(self.operation.id, [*noted, *(one for one in processes if one not in noted)])

    @property
    def log(self) -> Path:
        """Where CRIU's log of a failed run is kept (root only)."""
        return self.paths.logs / f"{self.session.id}-{self.operation.kind}.log"


@dataclass(frozen=True)
class Done:
    """How a transition ends: the session's new state and further fields, and the result for whoever asked."""

    state: State
    result: dict[str, Any]
    changes: dict[str, Any]


class Transition(Protocol):
    """One kind of transition. `steps` maps each step of the plan, except `record`, to what does it.

    `past_return` becomes true before what cannot be taken back: the tree is ended, or runs.
    """

    past_return: bool

    def steps(self) -> dict[str, Callable[[], None]]:
        """What to call for each step."""
        ...

    def record(self) -> Done:
        """Called last. What it returns is written to the registry together with the end of the operation."""
        ...

    def undo(self) -> None:
        """Called after a failure of any step: the session is then as it was before."""
        ...


def execute(context: Context, transition: Transition) -> None:
    """Runs the plan. Raises the failure of a step after everything was undone and the registry says so.

    After a failure past the point of no return nothing is undone, and the operation stays open: whoever finds its
    worker gone looks at what is there, and concludes it as if the worker had been killed.
    """
    operation, registry = context.operation, context.registry
    actions = transition.steps()
    try:
        for step in operation.steps[:-1]:
            actions[step]()
            registry.mark_step(operation.id, step)
            _pause(operation.kind, step)
        done = transition.record()
    except (TorporError, OSError) as failure:
        error = _as_torpor_error(failure, context.session)
        if transition.past_return:
            logger.error("The %s of session %s failed at its end: %s", operation.kind, context.session.name, failure)
            raise error from failure
        transition.undo()
        registry.finish_operation(operation.id, "undone", operation.before, error=error.as_dict())
        raise error from failure
    registry.finish_operation(operation.id, "completed", done.state, result=done.result, **done.changes)
    _pause(operation.kind, operation.steps[-1])


def deadline(size: int) -> float:
    """Seconds after which a CRIU that has to move `size` bytes is taken for hung. Raises UsageError."""
    try:
        return float(os.environ.get(LEAST_DEADLINE, "60")) + size / SLOWEST_BYTES
    except ValueError as error:
        raise UsageError(f"{LEAST_DEADLINE} is not a number of seconds: {os.environ[LEAST_DEADLINE]!r}.") from error


def tell_keeper(paths: Paths, tell: Callable[[KeeperClient], None]) -> None:
    """Tells the keeper something that it learns anyway when it was dead: from the agent, which restarts it."""
    try:
        with closing(KeeperClient(paths)) as keeper:
            tell(keeper)
    except EngineError as unreachable:
        logger.warning("The keeper was not told: %s", unreachable)


class Stopwatch:
    """Seconds since it was made, and named laps."""

    def __init__(self) -> None:
        self._started = self._lap = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Names the time since the last lap."""
        now = time.monotonic()
        self.seconds[name] = round(now - self._lap, 4)
        self._lap = now

    def total(self) -> None:
        """Names the time since the start `total`."""
        self.seconds["total"] = round(time.monotonic() - self._started, 4)


def _as_torpor_error(failure: TorporError | OSError, session: Session) -> TorporError:
    if isinstance(failure, TorporError):
        return failure
    kind = StoreError if failure.filename else EngineError
    return kind(f"Session {session.name}: {failure}.", safe="The session is as it was before.")


def prepare_pause() -> None:
    """Keeps the signal that ends a pause for the pause: called before there are threads, which would die of it."""
    if PAUSE_AFTER in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def _pause(kind: OperationKind, step: str) -> None:
    if os.environ.get(PAUSE_AFTER) == f"{kind}:{step}":
        os.write(1, f'{{"event":"paused","step":"{step}"}}\n'.encode())
        signal.sigwait({signal.SIGUSR1})
