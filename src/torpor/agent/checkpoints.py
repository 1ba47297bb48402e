"""Checkpoints after they were made: removed, and verified by a process of their own."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from torpor.agent.folders import site_key
from torpor.agent.turns import Turns
from torpor.errors import Conflict, NotFound, TorporError, from_dict
from torpor.model import Checkpoint
from torpor.paths import Paths
from torpor.sessions.registry import Registry
from torpor.store import Store

logger = logging.getLogger(__name__)

COLLECT_AGAIN = 30.0  # seconds until space is looked for again that could not be freed while the store was in use

_verifications = Turns(1)
_pending: set[asyncio.Task[None]] = set()


async def remove_all(paths: Paths, registry: Registry, session_id: str) -> int:
    """Removes every checkpoint of a session; gives the bytes freed, 0 when they can only be freed later."""
    doomed = registry.checkpoints(session_id)
    await asyncio.to_thread(shutil.rmtree, paths.state / "pins" / session_id, ignore_errors=True)
    if not doomed:
        return 0
    await asyncio.to_thread(_delete, paths, doomed)
    for checkpoint in doomed:
        registry.delete_checkpoint(checkpoint.id)
    return await _collect(paths)


async def verify(uid: int, chosen: Sequence[Checkpoint]) -> AsyncIterator[dict[str, Any]]:
    """Reads and authenticates every byte, in other processes: the agent itself moves none. One at a time for each user.

    Yields progress events, then a result with the checkpoints' ids; raises what was found wrong.
    """
    async with _verifications.turn(uid):
        for checkpoint in chosen:
            async for event in _verify_one(checkpoint):
                yield event
    yield {"event": "result", "checkpoints": [checkpoint.id for checkpoint in chosen]}


async def _verify_one(checkpoint: Checkpoint) -> AsyncIterator[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "torpor.agent.verifier", checkpoint.id, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    answer: dict[str, Any] = {}
    try:
        async for line in process.stdout:
            answer = json.loads(line)
            if answer.get("event") == "progress":
                yield answer
        await process.wait()
    finally:
        if process.returncode is None:  # whoever asked has gone
            process.kill()
            await process.wait()
    _raise_failure(checkpoint.id, answer, process.returncode)


def _raise_failure(checkpoint_id: str, answer: dict[str, Any], status: int | None) -> None:
    if answer.get("event") == "error":
        raise from_dict(answer["error"])
    if answer.get("event") != "result":
        raise TorporError(f"The verification of checkpoint {checkpoint_id} ended without an answer ({status}).")


def _delete(paths: Paths, doomed: Sequence[Checkpoint]) -> None:
    with Store.open(paths.store, site_key(paths)) as store:
        for checkpoint in doomed:
            try:
                store.delete(checkpoint.session, checkpoint.id)
            except NotFound:
                logger.info("Checkpoint %s was not in the store any more", checkpoint.id)


async def _collect(paths: Paths) -> int:
    def collect() -> int:
        with Store.open(paths.store, site_key(paths)) as store:
            return store.collect()

    try:
        return await asyncio.to_thread(collect)
    except Conflict:
        again = asyncio.get_running_loop().create_task(_collect_later(paths))
        _pending.add(again)
        again.add_done_callback(_pending.discard)
    except TorporError as error:
        logger.error("The space of removed checkpoints is not freed: %s", error)
    return 0


async def _collect_later(paths: Paths) -> None:
    await asyncio.sleep(COLLECT_AGAIN)
    if len(_pending) == 1:  # a later removal tries later
        await _collect(paths)
