"""Routes of operations and checkpoints: lines of JSON as the work goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from torpor.agent import checkpoints as stored
from torpor.agent.node import Node
from torpor.api import requests
from torpor.api.access import caller_of, find_checkpoint, find_session, node_of, session_of
from torpor.api.views import checkpoint_view
from torpor.errors import NotFound, TorporError
from torpor.model import Checkpoint, OperationKind, Session, State

logger = logging.getLogger(__name__)

NOTHING_DONE = {"bytes_logical": 0, "bytes_stored": 0, "bytes_new": 0, "seconds": {}}


async def operate(request: Request) -> Response:
    """Runs checkpoint, hibernate or resume; it goes on when the caller leaves.

    Raises Conflict when another operation is in progress, except that a resume waits for a hibernation.
    """
    node, session = node_of(request), session_of(request, admins=True)
    kind = OperationKind(request.url.path.rpartition("/")[2])
    if kind is OperationKind.RESUME:
        waits = session.state in (State.HIBERNATING, State.RESUMING)
        if not waits and (running := await node.operations.resume(session)) is not None:
            return _lines(running.events())
        return _lines(_resumed(node, session))
    if_idle = request.query_params.get("if_idle", "0") == "1"
    return _lines(node.operations.begin(session, kind, if_idle=if_idle).events())


async def compatibility(request: Request) -> Response:
    """How a resume would go, and nothing is changed."""
    node, session = node_of(request), session_of(request, admins=True)
    return JSONResponse(await asyncio.to_thread(node.operations.rehearsal(session)))


async def checkpoints(request: Request) -> Response:
    """A session's checkpoints, newest first."""
    node, session = node_of(request), session_of(request, admins=True)
    return JSONResponse([checkpoint_view(one) for one in node.registry.checkpoints(session.id)])


async def verify(request: Request) -> Response:
    """Reads and authenticates every byte of a session's checkpoints, or of one."""
    node = node_of(request)
    asked = await requests.body_of(request, requests.Verify)
    return _lines(stored.verify(caller_of(request).uid, _chosen(request, node, asked.ref)))


def _chosen(request: Request, node: Node, ref: str) -> list[Checkpoint]:
    caller = caller_of(request)
    try:
        session = find_session(node, caller, ref)
    except NotFound:
        return [find_checkpoint(node, caller, ref)]
    return node.registry.checkpoints(session.id)


async def _resumed(node: Node, session: Session) -> AsyncIterator[dict[str, Any]]:
    """A resume that first waits, or that has nothing to do."""
    going_on = node.operations.of(session.id)
    if going_on is not None and going_on.operation.kind is OperationKind.HIBERNATE:
        yield {"event": "progress", "phase": "waiting for the hibernation to end", "done": 0, "total": 1}
    running = await node.operations.resume(session)
    if running is not None:
        async for event in running.events():
            yield event
        return
    newest = node.registry.checkpoints(session.id)
    yield {"event": "result", "id": newest[0].id if newest else None, **NOTHING_DONE, "already_running": True}


def _lines(events: AsyncIterator[dict[str, Any]]) -> Response:
    return StreamingResponse(_encoded(events), media_type="application/x-ndjson")


async def _encoded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield msgspec.json.encode(event) + b"\n"
    except TorporError as error:
        yield msgspec.json.encode({"event": "error", "error": error.as_dict()}) + b"\n"
