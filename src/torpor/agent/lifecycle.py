"""The life of a session outside of operations: started, ended, removed, and found to have ended by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

from torpor.agent import checkpoints
from torpor.agent.board import Board
from torpor.agent.keeper_link import KeeperLink
from torpor.agent.operations import Operations
from torpor.agent.running import is_alive
from torpor.agent.turns import Turns
from torpor.engine import keeper_client, procfs
from torpor.errors import Conflict, NotFound, TorporError
from torpor.model import ALIVE, Caller, Launch, OperationKind, ProcessId, Session, State
from torpor.paths import Paths
from torpor.sessions.registry import Registry

logger = logging.getLogger(__name__)

LAUNCHES_AT_ONCE = 4  # of one user
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
STATUS_PATIENCE = 1.0  # seconds until an exit status that nobody told is unknown
KILLED_WITHIN = 30.0  # seconds that the kernel may need to end a killed tree
TYPED = (128 + signal.SIGINT, 128 + signal.SIGQUIT)  # somebody pressed a key
PRESENT = frozenset({State.STARTING, State.RUNNING, State.SUSPENDED})


class Lifecycle:
    """Starts, ends and removes sessions. Belongs to the event loop."""

    def __init__(
        self, paths: Paths, registry: Registry, keeper: KeeperLink, board: Board, operations: Operations, node: str
    ) -> None:
        self.paths = paths
        self.registry = registry
        self.keeper = keeper
        self.board = board
        self.operations = operations
        self.node = node
        self._statuses: dict[str, int | None] = {}  # exit statuses that the keeper told
        self._asked_to_end: set[str] = set()
        self._signalled: dict[str, int] = {}  # the last signal that each session's owner sent
        self.failed: Callable[[Session], None] = lambda _: None  # told of a failure that nobody asked for
        self._launches = Turns(LAUNCHES_AT_ONCE)

    async def launch(self, caller: Caller, launch: Launch, *, name: str | None, **facts: Any) -> Session:
        """Starts a session; `facts` are labels, idle_after and kind. Nothing is left of one that cannot start."""
        session_id = secrets.token_hex(6)
        self.registry.create_session(
            Session(
                id=session_id,
                name=name or f"{slug(launch.argv[0])}-{session_id[:4]}",
                state=State.STARTING,
                uid=caller.uid,
                owner=user_name(caller.uid),
                node=self.node,
                created=time.time(),
                launch=launch,
                caller=caller,
                **facts,
            )
        )
        folder = self.paths.session(session_id)
        try:
            folder.mkdir(mode=0o711)
            folder.chmod(0o711)
            async with self._launches.turn(caller.uid):
                init, terminal = await self.keeper.launch(session_id, folder, launch, caller)
        except (TorporError, OSError):
            self.registry.delete_session(session_id)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.registry.update_session(session_id, state=State.RUNNING, init=init, terminal=terminal)
        self.board.active(session_id, time.time())
        self.settle(session_id)
        return self.registry.session(session_id)

    def exited(self, session_id: str, status: int | None) -> None:
        """The keeper saw a session's init end."""
        self._statuses[session_id] = status
        self.settle(session_id)

    def settle(self, session_id: str, *, last_look: bool = False) -> None:
        """Looks at one session and notes it when its processes are gone without Torpor having ended them.

        The keeper may tell an exit status a moment after the kernel shows the end; at the `last_look` it is unknown.
        """
        try:
            session = self.registry.session(session_id)
        except NotFound:
            return
        self._note_resume(session)
        if self.operations.in_progress(session_id) or (session.state in PRESENT and session.init is None):
            return  # the operation's end, or the launch's, is looked at again
        if session.state not in PRESENT or (session.init is not None and is_alive(session.init)):
            self._statuses.pop(session_id, None)
            return
        status = keeper_client.exit_status(self.paths.session(session_id))
        if status is None and session_id not in self._statuses and not last_look:
            asyncio.get_running_loop().call_later(STATUS_PATIENCE, lambda: self.settle(session_id, last_look=True))
            return
        told = self._statuses.pop(session_id, None)
        self.note_end(session, told if status is None else status)

    def note_end(self, session: Session, status: int | None, error: dict[str, str] | None = None) -> None:
        """Ended when it went well or its owner asked for it, else failed; the exit status is kept, None = unknown."""
        well = status == 0 or session.id in self._asked_to_end
        now = self._time_of_end(session.id)
        ended = self.registry.update_session(
            session.id,
            state=State.ENDED if well else State.FAILED,
            init=None,
            exit_status=status,
            ended=now,
            died=now,
            error=error,
        )
        self._asked_to_end.discard(session.id)
        by_owner = status in TYPED or status == 128 + self._signalled.pop(session.id, -128)
        logger.info("Session %s ended, exit status %s", session.name, "unknown" if status is None else status)
        if not well and not by_owner:
            self.failed(ended)
        self.board.notify(session.id)

    def signal(self, session: Session, signum: int) -> None:
        """Signals the main command's process group, by way of its init. Raises Conflict when it is not running."""
        if session.init is None or not _send(session.init, signum):
            hint = f"Bring it back with: torpor resume {session.name}" if session.state is State.HIBERNATED else ""
            raise Conflict(f"Session {session.name} is {session.state}: there is no process to signal.", hint=hint)
        self._signalled[session.id] = signum

    async def end(self, session_id: str, *, keep: bool) -> Session:
        """Ends a session as its owner asked: SIGTERM, SIGKILL after a grace; its checkpoints go unless kept."""
        await self.operations.quiet(session_id, arriving=False)
        session = self.registry.session(session_id)
        if session.init is not None and is_alive(session.init):
            self._asked_to_end.add(session_id)
            tree = _identified(procfs.tree(session.init.pid)) if session.outside else []
            await self._end_tree(session_id, session.init)
            for process in tree:  # these do not die with the first one, as they do in a namespace
                procfs.kill(process)
            self.settle(session_id)
            while self.registry.session(session_id).state in PRESENT:
                await self.board.news(session_id, STATUS_PATIENCE)
        elif session.state is State.HIBERNATED:
            self.registry.transition(session_id, {State.HIBERNATED}, State.ENDED, ended=time.time())
            self.board.notify(session_id)
        await self.operations.quiet(session_id)
        if not keep:
            await checkpoints.remove_all(self.paths, self.registry, session_id)
        return self.registry.session(session_id)

    async def remove(self, session: Session, *, force: bool) -> int:
        """Removes a session, its checkpoints and its files; gives the bytes freed in the store.

        Raises Conflict when it is alive, or in an operation, and not `force`.
        """
        if not force and (session.state in ALIVE or self.operations.in_progress(session.id)):
            raise Conflict(
                f"Session {session.name} is {session.state}.",
                safe="Nothing was removed.",
                hint=f"End it first, or end and remove it at once with: torpor rm --force {session.name}",
            )
        await self.end(session.id, keep=True)
        freed = await checkpoints.remove_all(self.paths, self.registry, session.id)
        await self.keeper.forget(session.id)
        await asyncio.to_thread(_remove_tree, self.paths.session(session.id))
        self.registry.delete_session(session.id)
        self._asked_to_end.discard(session.id)
        self._signalled.pop(session.id, None)
        self.board.forget(session.id)
        return freed

    async def _end_tree(self, session_id: str, init: ProcessId) -> None:
        for signum, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, KILLED_WITHIN)):
            _send(init, signum)
            _send(init, signal.SIGCONT)
            if await _gone(init, patience):
                return
        raise Conflict(
            f"The processes of session {session_id} did not end within {KILLED_WITHIN:.0f} seconds of SIGKILL.",
            safe="Nothing was removed.",
            hint="They wait for a device or a file system; ask again later.",
        )

    def _time_of_end(self, session_id: str) -> float:
        """When the exit status was written; now, when it was not."""
        try:
            written = (self.paths.session(session_id) / "exit").stat()
        except FileNotFoundError:
            return time.time()
        return min(written.st_mtime, time.time()) if written.st_size else time.time()

    def _note_resume(self, session: Session) -> None:
        last = self.registry.last_operation(session.id)
        if last is not None and last.kind is OperationKind.RESUME and last.outcome == "completed" and last.ended:
            self.board.resumed[session.id] = last.ended


def _identified(pids: list[int]) -> list[ProcessId]:
    boot = procfs.boot_id()
    return [ProcessId(pid, started, boot) for pid in pids if (started := procfs.start_time(pid)) is not None]


def _send(process: ProcessId, signum: int) -> bool:
    """Signals exactly this process; False when it is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


async def _gone(process: ProcessId, patience: float) -> bool:
    """Whether the process ended within `patience` seconds."""
    deadline = time.monotonic() + patience
    pause = 0.01
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.2)
    return True


def _remove_tree(folder: os.PathLike[str]) -> None:
    if os.path.lexists(folder):
        shutil.rmtree(folder)


def user_name(uid: int) -> str:
    """The name of a user, or the number of one who has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def slug(command: str) -> str:
    """What of a command can be part of a session's name."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(command)).strip("-").lower()
    return words[:32].strip("-") or "session"
