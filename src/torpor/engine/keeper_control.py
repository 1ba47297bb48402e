"""Connections to the control socket: root's own processes, which may be slow, many or gone."""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torpor.engine import keeper_wire
from torpor.engine.keeper_loop import HUNG_UP, Loop

QUEUE_LIMIT = 1024

Reply = tuple[dict[str, Any], list[int]]


@dataclass(frozen=True)
class Request:
    """One request: its name, its arguments by name (KeyError for a missing one), its descriptors, where it came from.

    Descriptors that are left in `fds` after it was handled are closed.
    """

    do: str
    arguments: dict[str, Any]
    fds: list[int]
    connection: ControlConnection

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def get(self, name: str) -> Any:
        """The argument, or None."""
        return self.arguments.get(name)


class ControlConnection:
    """One connection. `handle(request)` returns the reply with descriptors to copy into it, or None when `reply` will
    be called later."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        handle: Callable[[Request], Reply | None],
        closed: Callable[[ControlConnection], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._handle = handle
        self._closed = closed
        self._unsent: deque[Reply] = deque()
        self._open = True
        loop.watch(sock.fileno(), self._ready)

    def reply(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a reply or an event; on a connection that has gone, nothing happens."""
        if not self._open:
            return
        self._unsent.append((message, [os.dup(fd) for fd in fds]))
        if len(self._unsent) > QUEUE_LIMIT:
            print("A control connection does not read its events; closed.", file=sys.stderr, flush=True)
            self.close()
            return
        self._send()

    def close(self) -> None:
        """Close the connection; once is enough, more is harmless."""
        if self._open:
            self._open = False
            self._loop.forget(self._sock.fileno())
            self._sock.close()
            for _, fds in self._unsent:
                keeper_wire.close_all(fds)
            self._unsent.clear()
            self._closed(self)

    def _ready(self, events: int) -> None:
        self._send()
        try:
            received = keeper_wire.receive(self._sock) if self._open else None
        except BlockingIOError:
            if events & HUNG_UP:
                self.close()
            return
        except ValueError as error:
            self.reply({"ok": False, "error": str(error)})
            return
        except OSError:
            self.close()
            return
        if received is None:
            self.close()
            return
        message, fds = received
        try:
            answer = self._handle(Request(str(message.get("do")), message, fds, self))
        finally:
            keeper_wire.close_all(fds)
        if answer is not None:
            self.reply(*answer)

    def _send(self) -> None:
        while self._open and self._unsent:
            message, fds = self._unsent[0]
            try:
                keeper_wire.send(self._sock, message, fds)
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self._unsent.popleft()
            keeper_wire.close_all(fds)
        if self._open:
            self._loop.watch(self._sock.fileno(), self._ready, write=bool(self._unsent))
