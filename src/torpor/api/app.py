"""The HTTP application: routes, and how errors cross the wire."""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torpor import errors
from torpor.agent.node import Node
from torpor.api import adoptions, operations, relay, sessions
from torpor.model import OperationKind

logger = logging.getLogger(__name__)

STATUS: dict[str, HTTPStatus] = {
    errors.UsageError.code: HTTPStatus.BAD_REQUEST,
    errors.NotFound.code: HTTPStatus.NOT_FOUND,
    errors.NotPermitted.code: HTTPStatus.FORBIDDEN,
    errors.Conflict.code: HTTPStatus.CONFLICT,
    errors.PreflightRefused.code: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.Incompatible.code: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.IntegrityError.code: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.StoreError.code: HTTPStatus.INSUFFICIENT_STORAGE,
    errors.SetupError.code: HTTPStatus.SERVICE_UNAVAILABLE,
}


def application(node: Node) -> Starlette:
    """The API of one node, version 1. Every route needs the caller that `PeerProtocol` puts into the scope."""
    one = "/v1/sessions/{ref}"
    routes = [
        Route("/v1/node", sessions.node_facts),
        Route("/v1/sessions", sessions.listing),
        Route("/v1/sessions", sessions.create, methods=["POST"]),
        Route("/v1/adoptions", adoptions.adopt, methods=["POST"]),
        Route(one, sessions.show),
        Route(one, sessions.remove, methods=["DELETE"]),
        Route(f"{one}/watch", sessions.watch),
        Route(f"{one}/signal", sessions.signal, methods=["POST"]),
        Route(f"{one}/end", sessions.end, methods=["POST"]),
        Route(f"{one}/why", sessions.why),
        Route(f"{one}/logs", sessions.logs),
        Route(f"{one}/compatibility", operations.compatibility),
        Route(f"{one}/checkpoints", operations.checkpoints),
        Route(f"{one}/kernel", relay.kernel, methods=["PUT"]),
        Route(f"{one}/quiesced", relay.quiesced, methods=["POST"]),
        Route(f"{one}/answered", relay.answered, methods=["POST"]),
        *(Route(f"{one}/{kind}", operations.operate, methods=["POST"]) for kind in OperationKind),
        Route("/v1/verify", operations.verify, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            errors.TorporError: _refusal,
            HTTPException: _no_route,
            Exception: _failure,
        },
    )
    app.state.node = node
    return app


def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, errors.TorporError)
    status = STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    return JSONResponse(error.as_dict(), status_code=status)


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = errors.NotFound(f"The API has no {request.method} {request.url.path}.")
    return JSONResponse(told.as_dict(), status_code=error.status_code)


def _failure(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    told = errors.TorporError(
        f"The agent failed in an unforeseen way ({type(error).__name__}).",
        safe="Sessions are not touched by that.",
        hint="Its log says more.",
    )
    return JSONResponse(told.as_dict(), status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
