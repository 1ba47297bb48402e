"""The idle timer: every few seconds each running session is judged, and hibernated when the policy says so."""

from __future__ import annotations

import asyncio
import logging
import time

from torpor.agent.board import Board
from torpor.agent.operations import Operations
from torpor.agent.running import is_alive
from torpor.engine import procfs
from torpor.errors import TorporError
from torpor.idle.facts import Facts
from torpor.idle.policy import Policy, PolicyFile
from torpor.idle.sensors import CpuMeter, terminal_use
from torpor.idle.verdict import due, judge
from torpor.model import InputOutput, OperationKind, ProcessId, Session, State
from torpor.sessions.registry import Registry

logger = logging.getLogger(__name__)

LONGEST_PERIOD = 2.0  # seconds between two looks
SHORTEST_PERIOD = 0.25
LOOKS_PER_LIMIT = 4
FLUSH_AFTER = 60.0  # seconds by which the registry's last activity may lag behind


class Timer:
    """Judges sessions and acts on it. Belongs to the event loop; `/proc` is read there, too, since it never blocks."""

    def __init__(self, registry: Registry, board: Board, operations: Operations, policy: PolicyFile) -> None:
        self.registry = registry
        self.board = board
        self.operations = operations
        self.policy = policy
        self._meter = CpuMeter(_tree_seconds)
        self._refused: dict[str, float] = {}
        self._attempts: set[asyncio.Task[None]] = set()
        self._problem: TorporError | None = None

    async def run(self) -> None:
        """Looks for ever."""
        while True:
            await asyncio.sleep(self._look_at_all())

    def facts(self, session: Session, init: ProcessId) -> Facts:
        """Everything that is known of a running session now; takes one more CPU sample."""
        limit = self._policy().limit(session.idle_after)
        has_terminal = session.launch.io is InputOutput.TERMINAL
        return Facts(
            now=time.time(),
            started=session.created,
            kind=session.kind,
            kernel=self.board.kernel(session),
            cpu=self._meter.sample(session.id, init, idle_after=limit),
            has_terminal=has_terminal,
            terminal=terminal_use(session.terminal) if has_terminal and session.terminal else None,
            last_resume=self.board.resumed.get(session.id),
            last_refusal=self._refused.get(session.id),
            idle_after=session.idle_after,
        )

    def _look_at_all(self) -> float:
        """Judges every session; seconds until the next look."""
        try:
            sessions, policy = self.registry.sessions(), self._policy()
        except TorporError as error:
            logger.error("Sessions cannot be judged: %s", error)
            return LONGEST_PERIOD
        for session in sessions:
            try:
                self._look(session, policy)
            except TorporError as error:
                logger.error("Session %s could not be judged: %s", session.name, error)
        return _period(sessions, policy)

    def _look(self, session: Session, policy: Policy) -> None:
        if session.state is not State.RUNNING or session.init is None or not is_alive(session.init):
            self._meter.forget(session.id)
            self._flush(session, lag=0.0)
            return
        facts = self.facts(session, session.init)
        verdict = judge(facts, policy)
        self.board.verdicts[session.id] = verdict
        self.board.active(session.id, verdict.since if verdict.verdict == "idle" else facts.now)
        self._flush(session, lag=FLUSH_AFTER)
        if due(verdict, policy, facts) == "hibernate" and self.operations.of(session.id) is None:
            logger.info("Session %s is hibernated by the policy: %s", session.name, verdict.sentence)
            attempt = asyncio.get_running_loop().create_task(self._hibernate(session))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)

    async def _hibernate(self, session: Session) -> None:
        self._flush(session, lag=0.0)
        try:
            ended = await self.operations.begin(session, OperationKind.HIBERNATE, if_idle=True).ended()
        except TorporError as error:
            logger.warning("Session %s was not hibernated: %s", session.name, error)
            self._refused[session.id] = time.time()
            return
        if ended.outcome == "completed":
            self._refused.pop(session.id, None)
        else:
            logger.warning("Session %s was not hibernated: %s", session.name, ended.error)
            self._refused[session.id] = time.time()

    def _flush(self, session: Session, *, lag: float) -> None:
        seen = self.board.activity.get(session.id, 0.0)
        if seen > session.last_activity + lag:
            self.registry.update_session(session.id, last_activity=seen)

    def _policy(self) -> Policy:
        policy = self.policy.current()
        if self.policy.problem is not self._problem:
            self._problem = self.policy.problem
            if self._problem is not None:
                logger.error("The policy is not changed: %s", self._problem)
        return policy


def _tree_seconds(init: ProcessId) -> float | None:
    return procfs.cpu_seconds(procfs.tree(init.pid)) if is_alive(init) else None


def _period(sessions: list[Session], policy: Policy) -> float:
    limits = [policy.limit(session.idle_after) for session in sessions if session.state is State.RUNNING]
    shortest = min(limits, default=LONGEST_PERIOD * LOOKS_PER_LIMIT)
    return min(max(shortest / LOOKS_PER_LIMIT, SHORTEST_PERIOD), LONGEST_PERIOD)
