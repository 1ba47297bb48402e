"""Answers that may be large: a user has only a few of them in memory at once, however slowly they are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from torpor.agent.shares import size_of
from torpor.agent.turns import Turns
from torpor.api.requests import LARGE_AT_ONCE
from torpor.model import Session

SMALL = 128 << 10  # bytes of commands and environments in an answer
PIECE = 64 << 10

_large = Turns(LARGE_AT_ONCE)


def of_sessions(uid: int, shown: Sequence[Session], build: Callable[[], Any], *, status: int = 200) -> Response:
    """The JSON that `build` makes of these sessions; a large one is made and sent when it is the user's turn."""
    if sum(size_of(session.launch) for session in shown) <= SMALL:
        return JSONResponse(build(), status_code=status)
    return StreamingResponse(_pieces(uid, build), status_code=status, media_type="application/json")


async def _pieces(uid: int, build: Callable[[], Any]) -> AsyncIterator[bytes]:
    """Each piece waits until the reader has taken most of those before it."""
    async with _large.turn(uid):
        content = memoryview(bytes(JSONResponse(build()).body))
        for start in range(0, len(content), PIECE):
            yield bytes(content[start : start + PIECE])
