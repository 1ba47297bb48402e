"""At the agent's start: what the registry says is compared with what is there, and made true again."""

from __future__ import annotations

import logging
import time

from torpor.agent.lifecycle import PRESENT
from torpor.agent.node import Node
from torpor.agent.running import is_alive
from torpor.durations import spoken_duration
from torpor.engine import keeper_client, procfs
from torpor.errors import EngineError
from torpor.model import ProcessId, Session, State

logger = logging.getLogger(__name__)


async def reconcile(node: Node) -> None:
    """Finds every session again, by pidfd and start time; sees operations that were left over through to their end."""
    held = await node.keeper.sessions()
    for operation in node.registry.open_operations():
        logger.info("The %s %s of an earlier agent is seen through", operation.kind, operation.id)
        node.operations.adopt(operation)
    for session in node.registry.sessions():
        if node.operations.in_progress(session.id):
            continue
        if session.state is State.STARTING and session.init is None:
            session = _find_launched(node, session, held.get(session.id))
        if session.state in PRESENT:
            await _find(node, session)
        else:
            await node.hand_over(session)


def _find_launched(node: Node, session: Session, init: ProcessId | None) -> Session:
    """The earlier agent died while the keeper launched this session."""
    if init is not None:
        return node.registry.update_session(session.id, state=State.RUNNING, init=init)
    error = EngineError("The agent was stopped while this session was being started.", hint="Start it again.")
    node.lifecycle.note_end(session, None, error.as_dict())
    return node.registry.session(session.id)


async def _find(node: Node, session: Session) -> None:
    init = session.init
    if init is not None and is_alive(init):
        await node.hand_over(session)
        node.lifecycle.settle(session.id)
    elif init is not None and init.boot_id != procfs.boot_id():
        _lost_with_the_node(node, session)
    else:
        node.lifecycle.note_end(session, keeper_client.exit_status(node.paths.session(session.id)))


def _lost_with_the_node(node: Node, session: Session) -> None:
    restarted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    when = _clock(restarted)
    newest = next((one for one in node.registry.checkpoints(session.id) if one.verified is not None), None)
    if newest is None:
        error = EngineError(
            f"The node was restarted at {when}, and this session had no verified checkpoint.",
            safe="Nothing of it could be kept.",
            hint="Start it again.",
        )
        node.lifecycle.note_end(session, None, error.as_dict())
        return
    lost = spoken_duration(max(restarted - newest.created, 0.0))
    error = EngineError(
        f"The node was restarted at {when}; what the session did in the {lost} since {_clock(newest.created)} is lost.",
        safe=f"Checkpoint {newest.id} of {_clock(newest.created)} is whole.",
        hint=f"Go on from it with: torpor resume {session.name}",
    )
    lost_here = node.registry.update_session(
        session.id, state=State.HIBERNATED, init=None, died=restarted, error=error.as_dict()
    )
    logger.warning("Session %s: %s", session.name, error)
    node.revival.consider(lost_here)
    node.board.notify(session.id)


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
