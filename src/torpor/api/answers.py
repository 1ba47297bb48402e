"""Answers that may be large: a user has only a few of them in memory at once, however slowly they are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from torpor.agent.turns import Turns
from torpor.api.requests import LARGE_AT_ONCE

SMALL = 128 << 10  # bytes
PIECE = 64 << 10

_large = Turns(LARGE_AT_ONCE)


def whole(uid: int, size: int, build: Callable[[], Any], *, status: int = 200) -> Response:
    """The JSON of what `build` reads, which is about `size` bytes; if large, read and sent when it is the user's turn.

    Until then nothing of it is kept: `build` must hold nothing large.
    """
    if size <= SMALL:
        return JSONResponse(build(), status_code=status)
    return StreamingResponse(_pieces(uid, build), status_code=status, media_type="application/json")


async def _pieces(uid: int, build: Callable[[], Any]) -> AsyncIterator[bytes]:
    """Each piece waits until the reader has taken most of those before it."""
    async with _large.turn(uid):
        content = memoryview(bytes(JSONResponse(build()).body))
        for start in range(0, len(content), PIECE):
            yield bytes(content[start : start + PIECE])
