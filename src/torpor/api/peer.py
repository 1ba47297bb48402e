"""Who is at the other end of a connection, as the kernel tells.

The credentials are those of the process that connected, at that moment. They travel in the request's scope, so that
no route can be reached without them.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import select
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from torpor.engine import procfs
from torpor.errors import NotPermitted

logger = logging.getLogger(__name__)

CONNECTIONS_PER_USER = 512  # of one uid at once; root is not counted
WARN_EVERY = 60.0  # seconds: who is turned away must not fill the log
SO_PEERGROUPS = {"sparc64": 0x3D}.get(os.uname().machine, 59)
SO_PEERPIDFD = {"sparc64": 0x56}.get(os.uname().machine, 77)
GROUPS_LIMIT = 65536  # of one process, for the kernel
_CREDENTIALS = struct.Struct("3i")
_NUMBER = struct.Struct("i")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Peer:
    """The process that connected: pid (0 when it cannot be seen from here), uid, gid, supplementary groups, and start
    time (clock ticks after boot; 0 when it had ended before that could be asked)."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    start_time: int = 0

    @property
    def sees_all(self) -> bool:
        """Root sees and may touch every session; everybody else their own only."""
        return self.uid == 0

    def is_member(self, gid: int | None) -> bool:
        """Whether the process had this group when it connected."""
        return gid is not None and (gid == self.gid or gid in self.groups)


class PeerProtocol(H11Protocol):
    """HTTP on a unix socket; `scope["state"]["peer"]` is the caller."""

    _open: ClassVar[Counter[int]] = Counter()
    _warned: ClassVar[dict[int, float]] = {}
    _peer: Peer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks the kernel who connected; a user with too many connections is turned away."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._peer = identify(transport.get_extra_info("socket"))
        self._open[self._peer.uid] += 1
        self.app_state = {**self.app_state, "peer": self._peer}
        if self._open[self._peer.uid] > CONNECTIONS_PER_USER and not self._peer.sees_all:
            self._warn_of(self._peer.uid)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the user's place back."""
        if self._peer is not None:
            self._open[self._peer.uid] -= 1
            if not self._open[self._peer.uid]:
                del self._open[self._peer.uid]
        super().connection_lost(exc)

    def _warn_of(self, uid: int) -> None:
        now = time.monotonic()
        if now - self._warned.get(uid, -WARN_EVERY) >= WARN_EVERY:
            self._warned[uid] = now
            logger.warning("User %d has more than %d connections; further ones are closed", uid, CONNECTIONS_PER_USER)


def peer_of(scope: dict[str, Any]) -> Peer:
    """The caller of a request. Raises NotPermitted when the connection carried no credentials."""
    peer = scope.get("state", {}).get("peer")
    if not isinstance(peer, Peer):
        raise NotPermitted("The caller is not known: connect through the agent's unix socket.")
    return peer


def identify(connection: socket.socket) -> Peer:
    """Whoever connected, asked of the socket; nothing of `/proc` is believed but a start time. Raises OSError."""
    pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid, gid, _groups(connection), _start_time(connection, pid))


def _groups(connection: socket.socket) -> tuple[int, ...]:
    """Of any number: Python's own getsockopt takes a kilobyte at most."""
    groups = (ctypes.c_uint32 * GROUPS_LIMIT)()
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    asked = (connection.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, groups, ctypes.byref(size))
    if _libc.getsockopt(*asked) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "SO_PEERGROUPS")
    return tuple(groups[: size.value // 4])


def _start_time(connection: socket.socket, pid: int) -> int:
    """The start time that belongs to the very process that connected: another one with its pid has a later one.

    A kernel that knows SO_PEERPIDFD lets us see that it had not ended while we looked.
    """
    if pid <= 0:
        return 0
    try:
        pidfd: int | None = _NUMBER.unpack(connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, _NUMBER.size))[0]
    except ProcessLookupError:
        return 0
    except OSError:
        pidfd = None  # an older kernel
    started = procfs.start_time(pid) or 0
    if pidfd is None:
        return started
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return 0 if poller.poll(0) else started
    finally:
        os.close(pidfd)
