"""One session as the keeper knows it: its first process, its terminal or stdin pipe, its log, its attached clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from collections.abc import Callable
from typing import Any

from torpor.engine.keeper_attach import AttachClient
from torpor.engine.keeper_loop import Loop
from torpor.engine.keeper_terminal import Terminal

_SESSION_ID = re.compile(r"[a-z0-9-]{1,40}")
_STATUS_LIMIT = 16


class KeptSession:
    """Everything the keeper holds for one session, from its launch or adoption until it is forgotten."""

    def __init__(self, loop: Loop, session: str, folder: str, uid: int, announce: Callable[[dict[str, Any]], None]):
        self.session = session
        self.folder = folder
        self.uid = uid
        self.pid = 0
        self.start_time = 0
        self.pidfd: int | None = None
        self.away = False
        self.ended = False
        self.status: int | None = None
        self.terminal: Terminal | None = None
        self.stdin_read: int | None = None
        self.stdin_write: int | None = None
        self._loop = loop
        self._announce = announce
        self._clients: list[AttachClient] = []

    def watch(self, pid: int, start_time: int, pidfd: int, ended: Callable[[KeptSession], None]) -> None:
        """From now on this is the session's first process; `ended` is called when it ends."""
        self.let_process_go()
        self.pid, self.start_time, self.pidfd = pid, start_time, pidfd
        self.ended, self.status = False, None
        self._loop.watch(pidfd, lambda _events: ended(self))

    def let_process_go(self) -> None:
        """Watch no process any more."""
        if self.pidfd is not None:
            self._loop.forget(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None

    def hold_terminal(self, master: int) -> Terminal:
        """Hold this pty master (taken over) in place of the one held before; output goes to out.log."""
        terminal = Terminal(self._loop, master, open_log(self.folder, self.uid), self)
        terminal.away = self.away
        if self.terminal is not None:
            self.terminal.close()
        self.terminal = terminal
        return terminal

    def hold_stdin(self, read: int | None, write: int | None) -> None:
        """Hold these ends of the stdin pipe in place of those held before."""
        close_if_open(self.stdin_read)
        close_if_open(self.stdin_write)
        self.stdin_read, self.stdin_write = read, write

    def let_stdin_writer_go(self) -> None:
        """Whoever else holds the pipe's write end decides from now on when the session's input ends."""
        close_if_open(self.stdin_write)
        self.stdin_write = None

    def set_away(self, away: bool) -> None:
        """Hibernated, or back: while away input is kept and announced; then it is given to the session."""
        self.away = away
        if self.terminal is not None:
            self.terminal.away = away
            if away and self.terminal.has_input:
                self.input_waits()
            elif not away and not self.ended and self.pidfd is not None:
                self.terminal.start()

    def signal(self, number: int) -> None:
        """Signal the session's first process. Raises ProcessLookupError when it is away or has ended."""
        if self.pidfd is None:
            raise ProcessLookupError("The session has no process now.")
        signal.pidfd_send_signal(self.pidfd, number)

    def attach(self, client: AttachClient, position: int | None) -> None:
        """Let a client see and type on the terminal. Raises ValueError when there is none."""
        if self.terminal is None:
            raise ValueError("The session has no terminal.")
        self._clients.append(client)
        client.accept(self.terminal, position)
        if self.ended:
            client.exited(self.status)

    def end(self, status: int | None) -> None:
        """The session has ended by itself: last output, exit status, then everything but the log is let go."""
        self.ended, self.status, self.away = True, status, False
        self.let_process_go()
        self.hold_stdin(None, None)
        if self.terminal is not None:
            self.terminal.end()
        for client in list(self._clients):
            client.exited(status)
        self._announce({"event": "exit", "session": self.session, "status": status})

    def close(self) -> None:
        """Forget the session: nothing of it is held any more."""
        self.let_process_go()
        self.hold_stdin(None, None)
        for client in list(self._clients):
            client.close()
        if self.terminal is not None:
            self.terminal.close()
            self.terminal = None

    def client_closed(self, client: AttachClient) -> None:
        """A client is gone."""
        if client in self._clients:
            self._clients.remove(client)

    def output_came(self, unlogged: bytes) -> None:
        """Of `TerminalOwner`."""
        for client in list(self._clients):
            client.output(unlogged)

    def input_waits(self) -> None:
        """Of `TerminalOwner`."""
        self._announce({"event": "input", "session": self.session})

    def input_taken(self) -> None:
        """Of `TerminalOwner`."""
        for client in list(self._clients):
            client.room()


def checked_session_id(session: object) -> str:
    """The id, if it is one: it becomes part of a path. Raises ValueError."""
    if not isinstance(session, str) or not _SESSION_ID.fullmatch(session):
        raise ValueError("Not the id of a session.")
    return session


def make_folder(folder: str) -> None:
    """The session's folder: entered by anyone who knows a name in it, changed by root only. Raises ValueError."""
    if not os.path.isabs(folder):
        raise ValueError("The session's folder is not an absolute path.")
    os.makedirs(os.path.dirname(folder), 0o711, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    fd = open_folder(folder)
    try:
        os.fchmod(fd, 0o711)
    finally:
        os.close(fd)


def open_folder(folder: str) -> int:
    """Descriptor of a session's folder. Raises ValueError when anyone but its owner, this user, may change it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    facts = os.fstat(fd)
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise ValueError(f"{folder} can be changed by others.")
    return fd


def open_log(folder: str, uid: int) -> int:
    """out.log, for appending and reading, given to the session's user."""
    parent = open_folder(folder)
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open("out.log", flags, 0o600, dir_fd=parent)
    finally:
        os.close(parent)
    os.fchown(fd, uid, -1)
    return fd


def owner_of(folder: str) -> int:
    """User id that the session's files belong to. Raises FileNotFoundError when it has none."""
    parent = open_folder(folder)
    try:
        return os.stat("exit", dir_fd=parent, follow_symlinks=False).st_uid
    finally:
        os.close(parent)


def recorded_status(folder: str) -> int | None:
    """The exit status that the session's first process wrote, None when it wrote none. The file is the user's."""
    try:
        parent = open_folder(folder)
    except FileNotFoundError:
        return None
    try:
        fd = os.open("exit", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return None
    finally:
        os.close(parent)
    with os.fdopen(fd, "rb") as file:
        text = file.read(_STATUS_LIMIT)
    return int(text) & 0xFF if text.isdigit() else None


def clear_status(folder: str) -> None:
    """Empty the recorded status, before a session that had ended is brought back from a checkpoint."""
    parent = open_folder(folder)
    try:
        fd = os.open("exit", os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)
    os.ftruncate(fd, 0)
    os.close(fd)


def close_if_open(fd: int | None) -> None:
    """Close a descriptor that may not be there."""
    if fd is not None:
        os.close(fd)
