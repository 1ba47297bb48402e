"""Routes of sessions: what there is, starting, watching, ending."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import torpor
from torpor.agent import callers, shares
from torpor.agent.node import Node
from torpor.api import answers, requests
from torpor.api.access import caller_of, may_look_into, node_of, sees_all, session_of
from torpor.api.peer import Peer
from torpor.api.views import session_view, verdict_view
from torpor.errors import NotFound, UsageError
from torpor.model import Launch, Session, State

WATCH_LIMIT = 300.0  # seconds
LOOK_EVERY = 1.0  # seconds between looks at the registry
LOOK_DURING_OPERATION = 0.02  # then its worker changes the registry, too
LOG_PERIOD = 0.1  # seconds between looks for more output
LOG_PIECE = 1 << 16
OVER = frozenset({State.ENDED, State.FAILED})
STREAMS = {"out": "out.log", "err": "err.log"}


async def node_facts(request: Request) -> Response:
    """Facts of the node and its agent."""
    node = node_of(request)
    caller_of(request)
    return JSONResponse(
        {
            "node": node.name,
            "version": torpor.__version__,
            "agent": {"pid": node.pid, "url": f"unix:{node.paths.agent_socket}", "started": node.started},
            "keeper": {"pid": node.keeper.pid},
            "state": str(node.paths.state),
            "config": str(node.paths.config),
        }
    )


async def listing(request: Request) -> Response:
    """The caller's sessions; root's listing, and that of admins, has everybody's."""
    node, caller = node_of(request), caller_of(request)
    owner = None if sees_all(node, caller) else caller.uid

    def read() -> list[dict[str, Any]]:
        found = node.registry.sessions(owner)
        return [session_view(node, session, whole=may_look_into(caller, session)) for session in found]

    size = sum(shares.size_of(session.launch) for session in node.registry.sessions(owner))
    return answers.whole(caller.uid, size, read)


async def create(request: Request) -> Response:
    """Starts a session as the caller."""
    node, caller = node_of(request), caller_of(request)
    new = await requests.large_body_of(request, requests.NewSession, caller.uid)
    requests.check_new_session(new)
    who = (caller.pid, caller.start_time, caller.uid, caller.gid, caller.groups)
    facts = await asyncio.to_thread(callers.facts, *who)
    launch = Launch(tuple(new.argv), new.cwd, new.env, new.io, new.rows, new.columns)
    if not caller.sees_all:
        shares.check(node.registry.sessions(caller.uid), launch)
    session = await node.lifecycle.launch(
        facts,
        launch,
        name=new.name,
        labels=new.labels,
        idle_after=new.idle_after,
        kind=new.kind,
        on_failure=new.on_failure,
    )
    return _view(node, caller, session, status=201)


async def show(request: Request) -> Response:
    """One session with its checkpoints whole."""
    return _view(node_of(request), caller_of(request), session_of(request, admins=True), full=True)


async def watch(request: Request) -> Response:
    """The session as soon as its version is greater than the caller's, or at the timeout."""
    node, caller, session = node_of(request), caller_of(request), session_of(request)
    session_id, version = session.id, session.version
    del session  # many may wait, and a session may have a large environment
    known = requests.number_of(request, "version", -1, -1, 1e15)
    timeout = requests.number_of(request, "timeout", 30, 0, WATCH_LIMIT)
    deadline = time.monotonic() + timeout
    with node.board.watching(session_id, caller.pid):
        while version <= known and (left := deadline - time.monotonic()) > 0 and not node.closing:
            if await request.is_disconnected():
                break  # a relay that was killed must not count as present
            pause = LOOK_DURING_OPERATION if node.operations.of(session_id) else LOOK_EVERY
            await node.board.news(session_id, min(left, pause))
            version = node.registry.session(session_id).version
    return _view(node, caller, node.registry.session(session_id))


async def signal(request: Request) -> Response:
    """Signals the main command's process group."""
    node, session = node_of(request), session_of(request)
    asked = await requests.body_of(request, requests.Signal)
    requests.check_signal(asked.signal)
    node.lifecycle.signal(session, asked.signal)
    return JSONResponse({})


async def end(request: Request) -> Response:
    """Ends a session: SIGTERM, SIGKILL after a grace."""
    node, session = node_of(request), session_of(request)
    asked = await requests.body_of(request, requests.End)
    return _view(node, caller_of(request), await node.lifecycle.end(session.id, keep=asked.keep))


async def remove(request: Request) -> Response:
    """Removes a session, its checkpoints and its files."""
    node, session = node_of(request), session_of(request)
    force = requests.number_of(request, "force", 0, 0, 1) == 1
    freed = await node.lifecycle.remove(session, force=force)
    return JSONResponse({"id": session.id, "name": session.name, "bytes_freed": freed})


async def why(request: Request) -> Response:
    """The verdict in a sentence, with the policy that acts on it."""
    node, session = node_of(request), session_of(request, admins=True)
    policy, problem = node.policy.current(), node.policy.problem
    return JSONResponse(
        {
            "id": session.id,
            "name": session.name,
            "state": session.state,
            **verdict_view(node, session),
            "idle_after": policy.limit(session.idle_after),
            "policy": msgspec.to_builtins(policy),
            "policy_problem": None if problem is None else problem.as_dict(),
        }
    )


async def logs(request: Request) -> Response:
    """What the session printed; with `follow` until it has ended."""
    node, session = node_of(request), session_of(request)
    stream = request.query_params.get("stream", "out")
    if stream not in STREAMS:
        raise UsageError(f"There is no stream {stream!r}.", hint=f"Known are {', '.join(STREAMS)}.")
    follow = requests.number_of(request, "follow", 0, 0, 1) == 1
    path = node.paths.session(session.id) / STREAMS[stream]
    return StreamingResponse(_pieces(node, session, path, follow=follow), media_type="application/octet-stream")


def _view(node: Node, caller: Peer, session: Session, *, full: bool = False, status: int = 200) -> Response:
    session_id, whole, size = session.id, may_look_into(caller, session), shares.size_of(session.launch)

    def read() -> dict[str, Any]:
        return session_view(node, node.registry.session(session_id), full=full, whole=whole)

    return answers.whole(caller.uid, size, read, status=status)


async def _pieces(node: Node, session: Session, path: Path, *, follow: bool) -> AsyncIterator[bytes]:
    """A regular file is read in the loop: what a session just printed is in the page cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        over = not follow
        while True:
            while piece := os.read(descriptor, LOG_PIECE):
                yield piece
            if over or node.closing:
                return
            await node.board.news(session.id, LOG_PERIOD)
            over = _is_over(node, session.id)
    finally:
        os.close(descriptor)


def _is_over(node: Node, session_id: str) -> bool:
    try:
        return node.registry.session(session_id).state in OVER
    except NotFound:
        return True
