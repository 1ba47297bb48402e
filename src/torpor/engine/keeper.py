"""The keeper: parent of sessions and workers, holder of terminals, witness of exits. It outlives the agent.

One thread, one loop, the standard library and little memory. It keeps nothing on disk: after its death the agent
starts another, which adopts the sessions that still run. A session never depends on it to go on running.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

from torpor.engine.keeper_attach import CLIENTS_PER_USER, AttachClient, peer_uid
from torpor.engine.keeper_control import ControlConnection
from torpor.engine.keeper_loop import Loop
from torpor.engine.keeper_requests import Requests
from torpor.engine.keeper_session import checked_session_id

PR_SET_CHILD_SUBREAPER = 36
ACCEPT_PAUSE_SECONDS = 0.2


class Keeper:
    """Accepts connections and connects them with what they ask for."""

    def __init__(self, control: socket.socket, attach: socket.socket, sessions_folder: str, python: str) -> None:
        """Listening sockets, the folder of sessions' folders, the interpreter for launcher and init."""
        self.loop = Loop()
        self._requests = Requests(self.loop, sessions_folder, python)
        self._attached: list[AttachClient] = []
        self._serve(control, self._accept_control)
        self._serve(attach, self._accept_attach)

    def _serve(self, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)

        def ready(_events: int) -> None:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many descriptors: leave the others in peace for a moment
                print(f"No connection can be accepted: {error}", file=sys.stderr, flush=True)
                self.loop.forget(listener.fileno())
                self.loop.later(ACCEPT_PAUSE_SECONDS, lambda: self.loop.watch(listener.fileno(), ready))
                return
            accepted(sock)

        self.loop.watch(listener.fileno(), ready)

    def _accept_control(self, sock: socket.socket) -> None:
        if peer_uid(sock) not in (0, os.geteuid()):
            sock.close()
            return
        ControlConnection(self.loop, sock, self._requests.handle, self._requests.connection_closed)

    def _accept_attach(self, sock: socket.socket) -> None:
        uid = peer_uid(sock)
        if sum(client.uid == uid for client in self._attached) >= CLIENTS_PER_USER:
            sock.close()
            return
        self._attached.append(AttachClient(self.loop, sock, self._greet, self._attach_closed))

    def _attach_closed(self, client: AttachClient) -> None:
        self._attached.remove(client)
        for kept in self._requests.sessions.values():
            kept.client_closed(client)

    def _greet(self, client: AttachClient, request: dict[str, Any]) -> None:
        session = checked_session_id(request.get("session"))
        kept = self._requests.sessions.get(session)
        if kept is None or client.uid not in (kept.uid, 0):
            client.refuse("There is no such session of yours here.")
        elif request.get("want") == "stdin":
            if kept.stdin_write is None:
                client.refuse("The session's standard input is not to be had: taken already, or not a pipe.")
            else:
                client.hand_over(kept.stdin_write)
                kept.let_stdin_writer_go()
        elif kept.terminal is None:
            client.refuse("The session has no terminal.")
        else:
            position = request.get("from")
            kept.attach(client, None if position is None else max(0, int(position)))


def listen(path: str, kind: socket.SocketKind, mode: int) -> socket.socket:
    """A listening unix socket at `path`, in place of one that a dead keeper left."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(path)
    os.chmod(path, mode)
    listener.listen(128)
    return listener


def become_daemon() -> None:
    """Leave the starter's session and process tree; orphans of sessions come to this process."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o022)
    with open("/proc/self/comm", "w") as file:
        file.write("torpor-keeper")
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Arguments: control socket, attach socket, sessions folder, session interpreter, ready and lock descriptor.

    The lock, held by its open file as long as this process lives, is what makes it the only keeper.
    """
    control_path, attach_path, sessions, python = sys.argv[1:5]
    ready, lock = int(sys.argv[5]), int(sys.argv[6])
    for fd in (ready, lock):
        os.set_inheritable(fd, False)
    become_daemon()
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    keeper = Keeper(
        listen(control_path, socket.SOCK_SEQPACKET, 0o600),
        listen(attach_path, socket.SOCK_STREAM, 0o666),
        sessions,
        python,
    )
    os.write(ready, b"ready")
    os.close(ready)
    keeper.loop.run()


if __name__ == "__main__":
    main()
