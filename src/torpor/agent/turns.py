"""Turns: what takes long is done only a few times at once for one user, who so cannot use up what all share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """At most `limit` turns of one user at a time; further ones wait for the first to end. Root waits like others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._semaphores: dict[int, asyncio.Semaphore] = {}
        self._interested: Counter[int] = Counter()

    @asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """One turn of this user."""
        semaphore = self._semaphores.setdefault(uid, asyncio.Semaphore(self._limit))
        self._interested[uid] += 1
        try:
            async with semaphore:
                yield
        finally:
            self._interested[uid] -= 1
            if not self._interested[uid]:
                del self._interested[uid], self._semaphores[uid]
