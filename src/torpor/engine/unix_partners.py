"""Who is at the other end of unix sockets, as the kernel's socket diagnosis (netlink) tells."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
ALL_STATES = 0xFFFFFFFF
SHOW_NAME, SHOW_PEER = 0x1, 0x4
ATTRIBUTE_NAME, ATTRIBUTE_PEER = 0, 2
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
REQUEST = struct.Struct("=BBHIIIII")  # family, protocol, pad, states, inode, what to show, cookie
MESSAGE = struct.Struct("=BBBBIII")  # family, type, state, pad, inode, cookie
ATTRIBUTE = struct.Struct("=HH")  # length, type
RECEIVE = 1 << 16


@dataclass(frozen=True)
class UnixSocket:
    """One unix socket of this network namespace. `peer` is the inode at the other end, 0 when there is none."""

    inode: int
    peer: int
    name: str  # the path it is bound to, `@name` for an abstract one, empty for none
    connected: bool  # stream or seqpacket: a datagram socket loses nothing when its peer goes


def unix_sockets() -> dict[int, UnixSocket]:
    """All unix sockets of the caller's network namespace, by inode. Raises OSError when the kernel does not tell."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as diagnosis:
        request = REQUEST.pack(socket.AF_UNIX, 0, 0, ALL_STATES, 0, SHOW_NAME | SHOW_PEER, 0, 0)
        header = HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0)
        diagnosis.send(header + request)
        return {found.inode: found for found in _answers(diagnosis)}


def _answers(diagnosis: socket.socket) -> Iterator[UnixSocket]:
    while True:
        data = diagnosis.recv(RECEIVE)
        while len(data) >= HEADER.size:
            length, kind, *_ = HEADER.unpack_from(data)
            body, data = data[HEADER.size : length], data[_aligned(length) :]
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                (code,) = struct.unpack_from("=i", body)
                raise OSError(-code, f"{os.strerror(-code)} (unix sockets cannot be listed)")
            yield _parsed(body)


def _parsed(body: bytes) -> UnixSocket:
    _, kind, _, _, inode, *_ = MESSAGE.unpack_from(body)
    attributes = body[MESSAGE.size :]
    peer, name = 0, ""
    while len(attributes) >= ATTRIBUTE.size:
        length, number = ATTRIBUTE.unpack_from(attributes)
        value = attributes[ATTRIBUTE.size : length]
        attributes = attributes[_aligned(length) :]
        if number == ATTRIBUTE_PEER:
            (peer,) = struct.unpack("=I", value)
        elif number == ATTRIBUTE_NAME:
            name = os.fsdecode(value.rstrip(b"\0") if value[:1] != b"\0" else b"@" + value[1:])
    return UnixSocket(inode, peer, name, kind != socket.SOCK_DGRAM)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
