"""Addresses at which a saved session listens, and whether they are free: CRIU fails half-way when one is not."""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass

from torpor.engine.protobuf import entries_of, fields_of

IS_SOCKET = b"\x08\x04"  # how an entry of FILES begins when its descriptor is an inet socket (fd_types.INETSK)
SOCKET = 4  # its field in the entry; below are fields of the socket (criu/images/sk-inet.proto)
FAMILY, STATE, PORT, ADDRESS, ONLY_IPV6 = 3, 6, 7, 11, 15
TCP_LISTEN = 10


@dataclass(frozen=True)
class Listener:
    """One TCP address with a listening socket."""

    family: int
    host: str
    port: int
    only_ipv6: bool = True

    @property
    def is_taken(self) -> bool:
        """Whether another socket of this node is in the way now."""
        with socket.socket(self.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, self.only_ipv6)
            try:
                probe.bind((self.host, self.port))
                probe.listen()
            except OSError as error:
                return error.errno == errno.EADDRINUSE
        return False


def listeners(files: bytes) -> list[Listener]:
    """The TCP listeners of a checkpoint, from CRIU's image FILES."""
    found = []
    for entry in entries_of(files):
        if entry.startswith(IS_SOCKET):
            values = [value for number, value in fields_of(entry) if number == SOCKET and isinstance(value, bytes)]
            found += [listener for value in values if (listener := _listener(value)) is not None]
    return found


def taken(files: bytes) -> list[str]:
    """Where a checkpoint listened and something else does now: "8888 of 127.0.0.1"."""
    return [f"{one.port} of {one.host}" for one in listeners(files) if one.is_taken]


def _listener(packed: bytes) -> Listener | None:
    fields = [(number, value) for number, value in fields_of(packed) if isinstance(value, int)]
    values = dict(fields)
    if values.get(STATE) != TCP_LISTEN:
        return None
    words = [value for number, value in fields if number == ADDRESS]
    host = socket.inet_ntop(values[FAMILY], struct.pack(f"={len(words)}I", *words))
    return Listener(values[FAMILY], host, values[PORT], bool(values.get(ONLY_IPV6, 0)))
