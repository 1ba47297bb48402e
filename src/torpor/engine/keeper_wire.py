"""Packets of the keeper's control socket: one JSON object each, with file descriptors. Standard library only.

An object too big for a packet travels in a memory file, whose descriptor then comes last.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

PACKET_LIMIT = 64 * 1024
DESCRIPTOR_LIMIT = 16
_IN_MEMORY_FILE = "in_memory_file"


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one object and copies of `fds`. Raises OSError, BlockingIOError on a full non-blocking socket."""
    packet = json.dumps(message).encode()
    if len(packet) < PACKET_LIMIT:
        send_with_descriptors(sock, packet, fds)
        return
    memory = memory_file(packet)
    try:
        send_with_descriptors(sock, json.dumps({_IN_MEMORY_FILE: True}).encode(), [*fds, memory])
    finally:
        os.close(memory)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next object and its descriptors (close-on-exec, the caller's to close); None at the end.

    Raises ValueError for a packet that is not such an object (its descriptors are closed), OSError.
    """
    packet, fds, complete = receive_with_descriptors(sock, PACKET_LIMIT)
    try:
        if not complete:
            raise ValueError("The packet is too big.")
        if not packet:
            return None
        message = json.loads(packet)
        if isinstance(message, dict) and message.get(_IN_MEMORY_FILE):
            message = json.loads(read_memory_file(fds.pop()))
        if not isinstance(message, dict):
            raise ValueError("The packet is not a JSON object.")
    except (ValueError, IndexError, RecursionError) as error:
        close_all(fds)
        raise ValueError(f"Not a packet: {error}") from error
    return message, fds


def send_with_descriptors(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send bytes with copies of descriptors."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    sock.sendmsg([data], [rights] if fds else [], socket.MSG_NOSIGNAL)


def receive_with_descriptors(sock: socket.socket, size: int) -> tuple[bytes, list[int], bool]:
    """Bytes, descriptors, and whether nothing was cut off.

    The descriptors are close-on-exec from the first moment, which `socket.recv_fds` of Python 3.11 does not do.
    """
    fds = array.array("i")
    room = socket.CMSG_LEN(DESCRIPTOR_LIMIT * fds.itemsize)
    data, ancillary, flags, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def memory_file(content: bytes) -> int:
    """A new memory file that holds `content`."""
    fd = os.memfd_create("torpor-packet", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    return fd


def read_memory_file(fd: int) -> bytes:
    """All bytes of a memory file, whose descriptor is closed."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor."""
    for fd in fds:
        os.close(fd)
