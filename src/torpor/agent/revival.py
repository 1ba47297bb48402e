"""Sessions that failed go on from their last checkpoint by themselves, where that is wished."""

from __future__ import annotations

import logging
import math
import time

from torpor.agent.board import Board
from torpor.agent.operations import Operations
from torpor.errors import TorporError
from torpor.idle.policy import PolicyFile
from torpor.model import OperationKind, Session
from torpor.sessions.registry import Registry

logger = logging.getLogger(__name__)

RELAY_SPEAKS_WITHIN = 10.0  # seconds since a relay that is there was last heard
LEAST_LIFE = 60.0  # seconds that a session must have run since it was brought back by itself, to be brought back again


class Revival:
    """Decides and acts on each failure, once. Belongs to the event loop."""

    def __init__(self, registry: Registry, board: Board, operations: Operations, policy: PolicyFile) -> None:
        self.registry = registry
        self.board = board
        self.operations = operations
        self.policy = policy

    def consider(self, session: Session) -> None:
        """Resumes a session that failed, if its owner or the policy wants that and it does not fail again and again.

        A kernel is left to Jupyter, which starts another, unless its relay is there to say what is lost.
        """
        wanted = session.on_failure or self.policy.current().on_failure
        if wanted != "resume" or not self._is_attended(session) or not self._has_checkpoint(session):
            return
        if self._lived(session) < LEAST_LIFE:
            logger.warning("Session %s failed again at once; it is not resumed by itself", session.name)
            return
        logger.info("Session %s failed and is resumed by itself", session.name)
        self.registry.update_session(session.id, revived=time.time())
        try:
            self.operations.begin(self.registry.session(session.id), OperationKind.RESUME)
        except TorporError as error:
            logger.warning("Session %s could not be resumed by itself: %s", session.name, error)

    def _is_attended(self, session: Session) -> bool:
        return session.kind != "kernel" or time.time() - self.board.relay_heard(session) < RELAY_SPEAKS_WITHIN

    def _has_checkpoint(self, session: Session) -> bool:
        return any(one.verified is not None for one in self.registry.checkpoints(session.id))

    def _lived(self, session: Session) -> float:
        """Seconds from when it was last brought back to when it died; endless when that never was done by itself."""
        if not session.revived:
            return math.inf
        last = self.registry.last_operation(session.id)
        came_back = last.ended if last is not None and last.kind is OperationKind.RESUME else None
        return (session.died or time.time()) - (came_back or session.revived)
