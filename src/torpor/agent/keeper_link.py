"""The agent's side of the keeper: started when none runs, replaced when it dies, asked without blocking the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torpor.engine import procfs
from torpor.engine.keeper_client import Events, KeeperClient, Launched, ensure_keeper
from torpor.errors import TorporError
from torpor.model import Caller, InputOutput, Launch, ProcessId
from torpor.paths import Paths

logger = logging.getLogger(__name__)

RETRY = 0.5  # seconds between attempts to replace a keeper

Answer = TypeVar("Answer")


class KeeperLink:
    """Every request has its own connection and thread, so that a slow launch holds up nothing else.

    The agent holds copies of what the keeper holds for sessions (pty masters, pipes), to give them to the next keeper.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._copies: dict[str, dict[str, int]] = {}
        self._events: Events | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False
        self.pid = 0

    async def start(
        self, on_event: Callable[[dict[str, Any]], None], on_replaced: Callable[[], Awaitable[None]]
    ) -> None:
        """Finds or starts the keeper. From now on its events go to `on_event`; when it has died and another was
        started, `on_replaced` gives that one what it must know. Raises EngineError when none can be started."""
        self._events, missed, self.pid = await asyncio.to_thread(self._connect)
        for event in missed:
            on_event(event)
        self._watching = asyncio.create_task(self._watch(on_event, on_replaced))
        self._watching.add_done_callback(_report_failure)

    def stop(self) -> None:
        """Lets the keeper go; it goes on."""
        self._stopping = True
        if self._events is not None:
            self._events.close()
        if self._watching is not None:
            self._watching.cancel()

    async def sessions(self) -> dict[str, ProcessId]:
        """The inits that the keeper watches, by session."""
        boot = procfs.boot_id()
        running = await self._ask(lambda keeper: keeper.sessions())
        return {one.name: ProcessId(one.pid, one.start_time, boot) for one in running}

    async def launch(self, session: str, folder: Path, launch: Launch, caller: Caller) -> tuple[ProcessId, str | None]:
        """Starts a session; its init, and the path of its terminal's own side when it has one."""
        launched: Launched = await self._ask(lambda keeper: keeper.launch(session, folder, launch, caller))
        for note in launched.notes:
            logger.warning("Session %s: %s", session, note)
        if launch.io is not InputOutput.DETACHED:
            await self.hold_copies(session)
        return ProcessId(launched.pid, launched.start_time, procfs.boot_id()), launched.terminal

    async def spawn(self, name: str, argv: list[str], env: Mapping[str, str], output: int, errors: int) -> ProcessId:
        """Starts a worker that outlives the agent; its standard output and error are these descriptors."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid, start_time = await self._ask(lambda keeper: keeper.spawn(name, argv, env, nothing, output, errors))
        finally:
            os.close(nothing)
        return ProcessId(pid, start_time, procfs.boot_id())

    async def adopt(self, session: str, init: ProcessId) -> None:
        """Gives a living session to the keeper, with the copies held of its terminal or pipe."""
        copies = self._copies.get(session, {})
        await self._ask(lambda keeper: keeper.adopt(session, init.pid, init.start_time, copies))

    async def keep_away(self, session: str, terminal: tuple[int, int] | None) -> None:
        """Makes the keeper hold what a session that is away had: the copies held here, or, when these were lost too, a
        new terminal of these rows and columns. A key that is pressed on it is told as an event."""
        copies = self._copies.get(session, {})

        def ask(keeper: KeeperClient) -> None:
            if copies:
                keeper.give_fds(session, copies)
            elif terminal is not None:
                keeper.hold_terminal(session, *terminal)
            keeper.away(session, True)

        await self._ask(ask)

    async def hold_copies(self, session: str) -> None:
        """Takes copies of what the keeper holds for a session, in place of earlier ones."""
        copies = await self._ask(lambda keeper: keeper.take_fds(session))
        self._drop_copies(session)
        if copies:
            self._copies[session] = copies

    async def forget(self, session: str) -> None:
        """Neither the keeper nor the agent holds anything of this session any more."""
        self._drop_copies(session)
        await self._ask(lambda keeper: keeper.forget(session))

    async def _ask(self, question: Callable[[KeeperClient], Answer]) -> Answer:
        def ask() -> Answer:
            keeper = ensure_keeper(self._paths)
            try:
                return question(keeper)
            finally:
                keeper.close()

        return await asyncio.to_thread(ask)

    def _connect(self) -> tuple[Events, list[dict[str, Any]], int]:
        """A subscription, what had happened before it, and the keeper's pid."""
        keeper = ensure_keeper(self._paths)
        try:
            events = Events(self._paths)
            pid = keeper.pid()  # its answer comes after the keeper has told everything that was missed
        finally:
            keeper.close()
        missed = []
        upcoming = iter(events)
        while select.select([events], [], [], 0)[0] and (event := next(upcoming, None)) is not None:
            missed.append(event)
        return events, missed, pid

    async def _watch(
        self, on_event: Callable[[dict[str, Any]], None], on_replaced: Callable[[], Awaitable[None]]
    ) -> None:
        while self._events is not None:
            await self._read(self._events, on_event)
            if self._stopping:
                return
            logger.warning("The keeper (process %d) is gone; sessions go on, another one is started", self.pid)
            self._events, missed, pid = await self._replacement()
            for event in missed:
                on_event(event)
            await on_replaced()
            self.pid = pid  # only now it has what its predecessor had
            logger.info("The keeper is process %d now", self.pid)

    async def _read(self, events: Events, on_event: Callable[[dict[str, Any]], None]) -> None:
        """Passes events on until the keeper is gone. They are read by a thread that does not hold up our exit."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def read() -> None:
            for event in events:
                _call_soon(loop, on_event, event)
            _call_soon(loop, gone.set)

        threading.Thread(target=read, name="keeper-events", daemon=True).start()
        await gone.wait()
        events.close()

    async def _replacement(self) -> tuple[Events, list[dict[str, Any]], int]:
        while True:
            try:
                return await asyncio.to_thread(self._connect)
            except (TorporError, OSError) as error:  # one that is just dying may still accept a connection
                logger.warning("The keeper could not be replaced yet: %s", error)
                await asyncio.sleep(RETRY)

    def _drop_copies(self, session: str) -> None:
        for descriptor in self._copies.pop(session, {}).values():
            os.close(descriptor)


def _report_failure(watching: asyncio.Task[None]) -> None:
    if not watching.cancelled() and watching.exception() is not None:
        logger.critical("The keeper is not watched any more", exc_info=watching.exception())


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        logger.debug("An event of the keeper came after the agent's end")
