"""One node's agent: its parts, put together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import Any

from torpor.agent.board import Board
from torpor.agent.folders import site_key
from torpor.agent.keeper_link import KeeperLink
from torpor.agent.lifecycle import Lifecycle
from torpor.agent.operations import Operations
from torpor.agent.revival import Revival
from torpor.agent.running import is_alive
from torpor.agent.timer import Timer
from torpor.errors import TorporError
from torpor.idle.policy import PolicyFile
from torpor.model import InputOutput, Session, State
from torpor.paths import Paths
from torpor.sessions.registry import Registry
from torpor.store import Store

logger = logging.getLogger(__name__)


class Node:
    """Everything that the routes need; belongs to the event loop."""

    def __init__(self, paths: Paths) -> None:
        """Opens the registry and reads the policy. Raises StoreError, NewerFormat or UsageError."""
        self.paths = paths
        self.name = socket.gethostname()
        self.pid = os.getpid()
        self.started = time.time()
        self.closing = False
        self._waking: set[asyncio.Task[None]] = set()
        self.registry = Registry(paths.database)
        self.policy = PolicyFile(paths.config)
        self.policy.current()
        self.board = Board()
        self.keeper = KeeperLink(paths)
        self.operations = Operations(paths, self.registry, self.keeper, self.board)
        self.lifecycle = Lifecycle(paths, self.registry, self.keeper, self.board, self.operations, self.name)
        self.timer = Timer(self.registry, self.board, self.operations, self.policy)
        self.operations.settle = self.lifecycle.settle
        self.revival = Revival(self.registry, self.board, self.operations, self.policy)
        self.lifecycle.failed = self.revival.consider

    async def start(self) -> None:
        """Finds or starts the keeper, and the store. Raises EngineError, StoreError or IntegrityError."""
        await asyncio.to_thread(Store.open, self.paths.store, site_key(self.paths), create=True)
        await self.keeper.start(self._heard, self._keeper_replaced)

    def close(self) -> None:
        """Lets everybody who waits go; sessions, keeper and workers go on."""
        self.closing = True
        self.board.notify_all()

    async def stop(self) -> None:
        """Ends what the agent itself does."""
        self.keeper.stop()
        await self.operations.stop()
        self.registry.close()

    async def hand_over(self, session: Session) -> None:
        """Makes the keeper hold what it must hold of one session; one that it cannot hold is logged, and left alone."""
        launch = session.launch
        size = (launch.rows, launch.columns) if launch.io is InputOutput.TERMINAL else None
        try:
            if session.init is not None and is_alive(session.init):
                await self.keeper.adopt(session.id, session.init)
            elif session.state is State.HIBERNATED and launch.io is not InputOutput.DETACHED:
                await self.keeper.keep_away(session.id, size)
            else:
                return
            if launch.io is not InputOutput.DETACHED:
                await self.keeper.hold_copies(session.id)
        except TorporError as error:
            logger.error("The keeper does not hold session %s: %s", session.name, error)

    async def _keeper_replaced(self) -> None:
        for session in self.registry.sessions():
            await self.hand_over(session)
            self.lifecycle.settle(session.id)

    def _heard(self, event: dict[str, Any]) -> None:
        session_id = event.get("session")
        if event["event"] == "exit" and session_id:
            self.lifecycle.exited(session_id, event.get("status"))
        elif event["event"] == "input" and session_id:
            self._wake(session_id)

    def _wake(self, session_id: str) -> None:
        """A key was pressed on the terminal of a session that is away."""
        task = asyncio.get_running_loop().create_task(self._resume(session_id))
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)

    async def _resume(self, session_id: str) -> None:
        try:
            await self.operations.resume(self.registry.session(session_id))
        except TorporError as error:
            logger.warning("Session %s could not be woken by its terminal: %s", session_id, error)
