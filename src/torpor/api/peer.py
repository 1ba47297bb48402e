"""Who is at the other end of a connection, as the kernel tells.

The credentials are those of the process that connected. They travel in the request's scope, so that no route can be
reached without them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from torpor.errors import NotPermitted

logger = logging.getLogger(__name__)

CONNECTIONS_PER_USER = 512  # of one uid at once; root is not counted
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """Pid (0 when it cannot be seen from here), uid and gid of the process that connected."""

    pid: int
    uid: int
    gid: int

    @property
    def sees_all(self) -> bool:
        """Root sees and may touch every session; everybody else their own only."""
        return self.uid == 0


class PeerProtocol(H11Protocol):
    """HTTP on a unix socket; `scope["state"]["peer"]` is the caller."""

    _open: ClassVar[Counter[int]] = Counter()
    _peer: Peer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks the kernel who connected; a user with too many connections is turned away."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._peer = Peer(*_CREDENTIALS.unpack(credentials))
        self._open[self._peer.uid] += 1
        self.app_state = {**self.app_state, "peer": self._peer}
        if self._open[self._peer.uid] > CONNECTIONS_PER_USER and not self._peer.sees_all:
            logger.warning("User %d has more than %d connections; one was closed", self._peer.uid, CONNECTIONS_PER_USER)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the user's place back."""
        if self._peer is not None:
            self._open[self._peer.uid] -= 1
        super().connection_lost(exc)


def peer_of(scope: dict[str, Any]) -> Peer:
    """The caller of a request. Raises NotPermitted when the connection carried no credentials."""
    peer = scope.get("state", {}).get("peer")
    if not isinstance(peer, Peer):
        raise NotPermitted("The caller is not known: connect through the agent's unix socket.")
    return peer
