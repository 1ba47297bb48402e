"""What the keeper knows and what it answers: sessions, workers and the requests of the control socket."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

from torpor.engine import keeper_children, procfs
from torpor.engine.keeper_attach import checked_size
from torpor.engine.keeper_children import Children
from torpor.engine.keeper_control import ControlConnection, Reply, Request
from torpor.engine.keeper_launch import Launch, default_signals
from torpor.engine.keeper_loop import Loop
from torpor.engine.keeper_session import KeptSession, checked_session_id, make_folder, owner_of, recorded_status
from torpor.engine.keeper_terminal import open_terminal
from torpor.engine.keeper_wire import read_memory_file

STATUS_TRIES, STATUS_PAUSE_SECONDS = 100, 0.1


class Requests:
    """Sessions and workers by name; each method `_do_NAME` answers the request NAME."""

    def __init__(self, loop: Loop, sessions_folder: str, python: str) -> None:
        """The folder of sessions' folders, and the interpreter for launcher and init."""
        self.sessions: dict[str, KeptSession] = {}
        self._loop = loop
        self._sessions_folder = sessions_folder
        self._python = python
        self._launching: set[str] = set()
        self._workers: dict[tuple[int, int], str] = {}
        self._subscribers: list[ControlConnection] = []
        self._children = Children(self._child_ended)
        loop.on_children_ended(self._children.reap)

    def handle(self, request: Request) -> Reply | None:
        """The reply to a request; None when it is given later, on the request's connection."""
        try:
            handler: Callable[[Request], Reply | None] | None = getattr(self, f"_do_{request.do}", None)
            if handler is None:
                raise ValueError(f"No such request: {request.do}.")
            return handler(request)
        except KeyError as error:
            return {"ok": False, "error": f"{error} is missing."}, []
        except (ValueError, TypeError, IndexError, OverflowError, OSError) as error:
            return {"ok": False, "error": str(error)}, []

    def connection_closed(self, connection: ControlConnection) -> None:
        """No events to this one any more."""
        if connection in self._subscribers:
            self._subscribers.remove(connection)

    def _do_hello(self, _request: Request) -> Reply:
        sessions = [
            {"session": kept.session, "pid": kept.pid, "start_time": kept.start_time}
            for kept in self.sessions.values()
            if kept.pidfd is not None
        ]
        workers = [{"name": name, "pid": pid, "start_time": start} for (pid, start), name in self._workers.items()]
        facts = {"pid": os.getpid(), "boot_id": procfs.boot_id(), "sessions": sessions, "workers": workers}
        return {"ok": True, **facts}, []

    def _do_launch(self, request: Request) -> None:
        session = checked_session_id(request["session"])
        if session in self.sessions or session in self._launching:
            raise ValueError(f"Session {session} exists already.")
        spec = json.loads(read_memory_file(request.fds.pop()))
        launch, uid = spec["launch"], int(spec["caller"]["uid"])
        folder = str(request.get("dir") or self._folder(session))
        make_folder(folder)
        kept = KeptSession(self._loop, session, folder, uid, self._announce)
        try:
            spec["folder"] = folder
            if launch["io"] == "terminal":
                spec["terminal"] = kept.hold_terminal(open_terminal(uid, launch["rows"], launch["columns"])).path
            elif launch["io"] == "streams":
                kept.hold_stdin(*os.pipe2(os.O_CLOEXEC))
            done = self._launched(request.connection, kept)
            Launch(self._loop, self._python, spec, kept.stdin_read, done)
        except BaseException:
            kept.close()
            raise
        self._launching.add(session)

    def _do_spawn(self, request: Request) -> Reply:
        name, argv, env = str(request["name"]), [str(item) for item in request["argv"]], dict(request["env"])
        if len(request.fds) != 3:
            raise ValueError("A worker needs three descriptors.")
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(request.fds)]
        pid = os.posix_spawn(
            argv[0], argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=default_signals()
        )
        start_time = procfs.start_time(pid) or 0  # it exists at least as a zombie: only this loop reaps
        self._workers[pid, start_time] = name
        return {"ok": True, "pid": pid, "start_time": start_time}, []

    def _do_adopt(self, request: Request) -> Reply:
        pid, start_time = int(request["pid"]), int(request["start_time"])
        kept = self._kept(request)
        names = request.get("names") or ["terminal"] * bool(request.fds)
        if kept.pidfd is not None and (kept.pid, kept.start_time) != (pid, start_time) and not kept.away:
            raise ValueError(f"Session {kept.session} runs already, as process {kept.pid}.")
        self._take_given(kept, names, request.fds)
        if kept.pidfd is None or (kept.pid, kept.start_time) != (pid, start_time):
            self._watch(kept, pid, start_time)
        if not kept.ended:
            kept.set_away(False)
        return {"ok": True, "terminal": kept.terminal.path if kept.terminal else None}, []

    def _do_forget(self, request: Request) -> Reply:
        kept = self.sessions.pop(checked_session_id(request["session"]), None)
        if kept is not None:
            kept.close()
        return {"ok": True}, []

    def _do_hold_terminal(self, request: Request) -> Reply:
        kept = self._kept(request)
        rows, columns = checked_size(int(request["rows"]), int(request["columns"]))
        if kept.terminal is None or kept.terminal.ended:
            kept.hold_terminal(open_terminal(kept.uid, rows, columns))
        terminal = kept.terminal
        return {"ok": True, "terminal": terminal.path if terminal else None}, []

    def _do_take_fds(self, request: Request) -> Reply:
        kept = self._kept(request)
        held: dict[str, int] = {}
        if kept.terminal is not None and not kept.terminal.ended:
            held["terminal"] = kept.terminal.master
        if kept.stdin_read is not None:
            held["stdin"] = kept.stdin_read
        return {"ok": True, "names": list(held)}, list(held.values())

    def _do_give_fds(self, request: Request) -> Reply:
        self._take_given(self._kept(request), request["names"], request.fds)
        return {"ok": True}, []

    def _do_signal(self, request: Request) -> Reply:
        self._known(request).signal(int(request["signum"]))
        return {"ok": True}, []

    def _do_kill(self, request: Request) -> Reply:
        self._known(request).signal(signal.SIGKILL)
        return {"ok": True}, []

    def _do_resize(self, request: Request) -> Reply:
        terminal = self._known(request).terminal
        if terminal is None:
            raise ValueError("The session has no terminal.")
        terminal.resize(*checked_size(int(request["rows"]), int(request["columns"])))
        return {"ok": True}, []

    def _do_away(self, request: Request) -> Reply:
        self._kept(request).set_away(bool(request["away"]))
        return {"ok": True}, []

    def _do_close_stdin(self, request: Request) -> Reply:
        self._known(request).let_stdin_writer_go()
        return {"ok": True}, []

    def _do_subscribe(self, request: Request) -> None:
        connection = request.connection
        self._subscribers.append(connection)
        connection.reply({"ok": True})
        for kept in self.sessions.values():
            if kept.away and kept.terminal is not None and kept.terminal.has_input:
                connection.reply({"event": "input", "session": kept.session})
            elif kept.ended:
                connection.reply({"event": "exit", "session": kept.session, "status": kept.status})

    def _do_stop(self, request: Request) -> Reply:
        busy = self._workers or self._launching or any(not kept.ended for kept in self.sessions.values())
        if busy and not request.get("force"):
            raise ValueError("The keeper still holds sessions or workers.")
        self._loop.later(0.0, self._loop.stop)
        return {"ok": True}, []

    def _launched(
        self, connection: ControlConnection, kept: KeptSession
    ) -> Callable[[int, int, list[str], str | None], None]:
        def done(pid: int, start_time: int, notes: list[str], error: str | None) -> None:
            self._launching.discard(kept.session)
            if error is not None:
                kill_exactly(pid, start_time)
                kept.close()
                connection.reply({"ok": False, "error": error})
                return
            self.sessions[kept.session] = kept
            if kept.terminal is not None:
                kept.terminal.start()
            path = kept.terminal.path if kept.terminal else None
            connection.reply({"ok": True, "pid": pid, "start_time": start_time, "terminal": path, "notes": notes})
            self._watch(kept, pid, start_time)

        return done

    def _watch(self, kept: KeptSession, pid: int, start_time: int) -> None:
        pidfd = keeper_children.open_pidfd(pid, start_time)
        if pidfd is not None:
            kept.watch(pid, start_time, pidfd, self._pidfd_ready)
            return
        kept.pid, kept.start_time = pid, start_time
        self._session_gone(kept, self._children.claim(pid, start_time))

    def _pidfd_ready(self, kept: KeptSession) -> None:
        """Its process has ended: our child, whose reaping tells the status, or after a restart somebody else's."""
        pidfd = kept.pidfd
        self._children.reap()
        if pidfd is None or kept.pidfd != pidfd:
            return
        self._loop.forget(pidfd)
        self._ask_status(kept, pidfd, STATUS_TRIES)

    def _ask_status(self, kept: KeptSession, pidfd: int, tries: int) -> None:
        """The kernel tells the status as soon as the other parent has reaped the process, which may take a while."""
        if kept.pidfd != pidfd:
            return
        unreaped = procfs.start_time(kept.pid) == kept.start_time
        status = keeper_children.exit_status_of(pidfd)
        if status is None and unreaped and tries > 0 and recorded_status(kept.folder) is None:
            self._loop.later(STATUS_PAUSE_SECONDS, lambda: self._ask_status(kept, pidfd, tries - 1))
        else:
            self._session_gone(kept, status)

    def _session_gone(self, kept: KeptSession, status: int | None) -> None:
        recorded = recorded_status(kept.folder)
        if kept.away and recorded is None:
            kept.let_process_go()  # ended on purpose, after it was saved
        else:
            kept.end(recorded if recorded is not None else status)

    def _child_ended(self, pid: int, start_time: int, status: int) -> bool:
        worker = self._workers.pop((pid, start_time), None)
        if worker is not None:
            self._announce({"event": "worker_exit", "name": worker, "pid": pid, "status": status})
            return True
        for kept in self.sessions.values():
            if kept.pidfd is not None and (kept.pid, kept.start_time) == (pid, start_time):
                self._session_gone(kept, status)
                return True
        return False

    def _kept(self, request: Request) -> KeptSession:
        """The session, known or (after a restart) found by its folder."""
        session = checked_session_id(request["session"])
        if session not in self.sessions:
            folder = str(request.get("dir") or self._folder(session))
            uid = int(request["uid"]) if "uid" in request else owner_of(folder)
            self.sessions[session] = KeptSession(self._loop, session, folder, uid, self._announce)
        return self.sessions[session]

    def _known(self, request: Request) -> KeptSession:
        session = checked_session_id(request["session"])
        if session not in self.sessions:
            raise ValueError(f"The keeper holds no session {session}.")
        return self.sessions[session]

    def _take_given(self, kept: KeptSession, names: list[str], fds: list[int]) -> None:
        if len(names) != len(fds):
            raise ValueError("The descriptors are not as many as their names.")
        for name in names:
            fd = fds.pop(0)
            if name == "terminal":
                kept.hold_terminal(fd)
            elif name == "stdin":
                kept.hold_stdin(fd, kept.stdin_write)
            else:
                os.close(fd)
                raise ValueError(f"No such descriptor: {name}.")

    def _folder(self, session: str) -> str:
        return os.path.join(self._sessions_folder, session)

    def _announce(self, event: dict[str, Any]) -> None:
        for connection in list(self._subscribers):
            connection.reply(event)


def kill_exactly(pid: int, start_time: int) -> None:
    """SIGKILL to this process if it is still the same."""
    pidfd = keeper_children.open_pidfd(pid, start_time) if pid else None
    if pidfd is not None:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself
        finally:
            os.close(pidfd)
