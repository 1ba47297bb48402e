"""Routes that only the relay of a kernel session uses."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torpor.api import requests
from torpor.api.access import caller_of, node_of, session_of
from torpor.errors import UsageError
from torpor.model import Session


async def kernel(request: Request) -> Response:
    """What the relay knows of its kernel; kept in memory, and stale soon after the relay has gone."""
    node, session = node_of(request), _kernel_session(request)
    report = await requests.body_of(request, requests.KernelReport)
    node.board.relay_spoke(session.id, caller_of(request).pid)
    node.board.kernels[session.id] = report.as_heard(time.time())
    return JSONResponse({})


async def quiesced(request: Request) -> Response:
    """The relay's answer to a hibernation that begins; the worker reads it from the registry."""
    node, session = node_of(request), _kernel_session(request)
    answer = await requests.body_of(request, requests.Quiesced)
    node.board.relay_spoke(session.id, caller_of(request).pid)
    node.registry.update_session(
        session.id,
        quiesced_version=answer.version,
        quiesced_ok=answer.ok,
        quiesced_reason=answer.reason,
        quiesced_lossless=answer.lossless,
        relay_heard=time.time(),
    )
    return JSONResponse({})


async def answered(request: Request) -> Response:
    """The kernel has answered after the resume that led to this version."""
    node, session = node_of(request), _kernel_session(request)
    answer = await requests.body_of(request, requests.Answered)
    node.board.relay_spoke(session.id, caller_of(request).pid)
    node.registry.update_session(session.id, answered=max(answer.version, session.answered), relay_heard=time.time())
    return JSONResponse({})


def _kernel_session(request: Request) -> Session:
    session = session_of(request)
    if session.kind != "kernel":
        raise UsageError(f"Session {session.name} is no kernel's session.")
    return session
