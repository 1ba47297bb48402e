"""Operations: who may start which now, and seeing each through to its end in the journal."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from torpor.agent.board import Board
from torpor.agent.keeper_link import KeeperLink
from torpor.agent.running import Running, find_worker, follow_worker, worker_command
from torpor.agent.turns import Turns
from torpor.errors import Conflict, TorporError
from torpor.model import Checkpoint, InputOutput, Operation, OperationKind, ProcessId, Session, State
from torpor.paths import Paths
from torpor.sessions import compatibility, planner, recovery
from torpor.sessions.registry import STARTS, Registry

logger = logging.getLogger(__name__)

SAVES_AT_ONCE, RESUMES_AT_ONCE = 4, 8  # of one user's sessions
RECOVERY_DELAYS = (0.0, 1.0, 5.0, 30.0)  # seconds before each attempt; the last one is repeated for ever


class Operations:
    """Starts, joins and concludes operations. Belongs to the event loop."""

    def __init__(self, paths: Paths, registry: Registry, keeper: KeeperLink, board: Board) -> None:
        self.paths = paths
        self.registry = registry
        self.keeper = keeper
        self.board = board
        self.settle: Callable[[str], None] = lambda _: None  # what looks at a session after each end
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._saves, self._resumes = Turns(SAVES_AT_ONCE), Turns(RESUMES_AT_ONCE)

    def of(self, session_id: str) -> Running | None:
        """The operation of this session that is in progress."""
        return self._running.get(session_id)

    def in_progress(self, session_id: str) -> bool:
        """Whether the journal has an operation of this session that has not ended."""
        last = self.registry.last_operation(session_id)
        return last is not None and last.ended is None

    def begin(self, session: Session, kind: OperationKind, *, if_idle: bool = False) -> Running:
        """Starts an operation. Raises Conflict when one is in progress or the session's state forbids it.

        `if_idle`: a kernel that is in the middle of anything is not hibernated.
        """
        if kind is OperationKind.HIBERNATE:
            self._refuse_busy_kernel(session, if_idle=if_idle)
        if session.kind == "kernel":
            self.registry.update_session(session.id, relay_heard=self.board.relay_heard(session))
        checkpoint = self._to_resume_from(session).id if kind is OperationKind.RESUME else None
        steps = planner.steps(kind, session)
        operation = self.registry.begin_operation(session.id, kind, steps, checkpoint=checkpoint, if_idle=if_idle)
        self.board.notify(session.id)
        running = self._running[session.id] = Running(operation)
        self._background(self._in_turn(running, session.uid))
        return running

    async def resume(self, session: Session) -> Running | None:
        """Brings a session back, whatever goes on: None when it runs already.

        A hibernation in progress is waited for first (its owner has returned), a resume in progress is joined.
        """
        while running := self.of(session.id):
            if running.operation.kind is OperationKind.RESUME:
                return running
            if running.operation.kind is OperationKind.CHECKPOINT:
                return None
            await running.ended()
        session = self.registry.session(session.id)
        if session.state in (State.RUNNING, State.STARTING):
            return None
        return self.begin(session, OperationKind.RESUME)

    async def quiet(self, session_id: str) -> None:
        """Waits until no operation of this session is in progress."""
        while running := self.of(session_id):
            await running.ended()

    async def stop(self) -> None:
        """Watches no operation any more; the workers go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def adopt(self, operation: Operation) -> Running:
        """Sees an operation of an earlier agent through: waits for its worker, recovers when that is gone."""
        running = self._running[operation.session] = Running(operation)
        worker = operation.worker or find_worker(operation.id)
        self._background(self._see_through(running, worker, None))
        return running

    def _refuse_busy_kernel(self, session: Session, *, if_idle: bool) -> None:
        kernel = self.board.kernel(session)
        if session.kind != "kernel" or kernel is None or (kernel.lossless and not if_idle):
            return
        reason = None
        if kernel.waiting_for_input:
            reason = "a cell waits for input"
        elif kernel.execution_state == "busy":
            reason = "its kernel is running a cell"
        elif kernel.queued:
            reason = f"{kernel.queued} of its requests are not answered yet"
        if reason:
            only = "" if kernel.lossless else " This kernel speaks TCP only: it is saved at quiet moments."
            raise Conflict(
                f"Session {session.name} is not hibernated: {reason}.{only}",
                safe="Nothing was changed.",
                hint="Ask again when the cell has ended, or interrupt it.",
            )

    def rehearsal(self, session: Session) -> Callable[[], dict[str, Any]]:
        """What finds out how a resume would go: it reads files, so call it in a thread.

        Raises Conflict when the session is there, or has nothing to come back from.
        """
        if session.state not in STARTS[OperationKind.RESUME][0]:
            raise Conflict(f"Session {session.name} is {session.state}; there is nothing to resume.")
        checkpoint = self._to_resume_from(session)
        newer = [one for one in self.registry.checkpoints(session.id) if one.created > checkpoint.created]
        return partial(compatibility.rehearse, self.paths, session, checkpoint, newer)

    def _to_resume_from(self, session: Session) -> Checkpoint:
        for checkpoint in self.registry.checkpoints(session.id):
            if checkpoint.verified is not None:
                return checkpoint
        raise Conflict(
            f"Session {session.name} is {session.state} and has no verified checkpoint to resume from.",
            hint=f"Look at: torpor checkpoints {session.name}",
        )

    async def _in_turn(self, running: Running, uid: int) -> None:
        """Many sessions of one user that fall idle together must not take all of the node's memory and cores."""
        turns = self._resumes if running.operation.kind is OperationKind.RESUME else self._saves
        async with turns.turn(uid):
            await self._carry_out(running)

    async def _carry_out(self, running: Running) -> None:
        operation = running.operation
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            worker = await self._spawn(operation, writing)
        except (TorporError, OSError) as error:
            os.close(reading)
            logger.error("The worker of %s %s did not start: %s", operation.kind, operation.id, error)
            await self._see_through(running, find_worker(operation.id), None)
            return
        finally:
            os.close(writing)
        try:
            running.operation = self.registry.note_worker(operation.id, worker)
        except Conflict:
            logger.info("The worker of %s had ended before it was noted", operation.id)
        await self._see_through(running, worker, reading)

    async def _spawn(self, operation: Operation, output: int) -> ProcessId:
        environment = {"PATH": os.defpath, **os.environ}
        home = os.environ.get("TORPOR_HOME")
        if home:
            environment["TORPOR_HOME"] = os.path.abspath(home)
        log = os.open(self.paths.logs / "workers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            argv = worker_command(operation.id)
            return await self.keeper.spawn(f"{operation.kind}-{operation.id}", argv, environment, output, log)
        finally:
            os.close(log)

    async def _see_through(self, running: Running, worker: ProcessId | None, output: int | None) -> None:
        session_id = running.operation.session
        if worker is not None:
            await follow_worker(worker, output, running.tell)
        operation = await self._closed(running.operation.id)
        if operation.kind is OperationKind.RESUME:
            await self._hold_copies(session_id)
        if self._running.get(session_id) is running:  # the next one may have begun as soon as the journal let it
            del self._running[session_id]
        try:
            self.settle(session_id)
        except TorporError as error:
            logger.error("What became of session %s could not be noted: %s", session_id, error)
        running.conclude(operation)
        self.board.notify(session_id)

    async def _closed(self, operation_id: str) -> Operation:
        """The operation as it ended; undone or completed here when its worker died before it could."""
        attempt = 0
        while (operation := self.registry.operation(operation_id)).ended is None:
            await asyncio.sleep(RECOVERY_DELAYS[min(attempt, len(RECOVERY_DELAYS) - 1)])
            attempt += 1
            logger.warning("The worker of %s %s is gone; recovering", operation.kind, operation_id)
            try:
                await asyncio.to_thread(recovery.recover, self.paths, self.registry, operation_id)
            except (TorporError, OSError):
                logger.exception("The recovery of %s failed; it will be tried again", operation_id)
        return operation

    async def _hold_copies(self, session_id: str) -> None:
        """A session that came back may have another terminal than it had."""
        if self.registry.session(session_id).launch.io is InputOutput.DETACHED:
            return
        try:
            await self.keeper.hold_copies(session_id)
        except TorporError as error:
            logger.error("The terminal of session %s would not outlive its keeper: %s", session_id, error)

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("An operation's task failed", exc_info=task.exception())
