"""The route that makes a session of a tree that runs already."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torpor.agent import adoption
from torpor.api import requests
from torpor.api.access import caller_of, node_of
from torpor.api.views import session_view


async def adopt(request: Request) -> Response:
    """Adopts a tree, or says what stands against it (`dry_run`)."""
    node, caller = node_of(request), caller_of(request)
    asked = await requests.body_of(request, requests.Adoption)
    requests.check_adoption(asked)
    asking = (caller.pid, caller.uid)
    if asked.dry_run:
        return JSONResponse(msgspec.to_builtins(await adoption.look(node, asked.pid, asking=asking)))
    session = await adoption.adopt(
        node, asked.pid, asking=asking, name=asked.name, labels=asked.labels, idle_after=asked.idle_after
    )
    return JSONResponse(session_view(node, session), status_code=201)
