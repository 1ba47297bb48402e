"""Connection files: the one that Jupyter wrote for its clients, and the inner one for the kernel behind the relay."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from torpor.errors import NotPermitted, SetupError, UsageError
from torpor.jupyter.inner import CHANNELS as INNER_CHANNELS

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
SESSIONS_OWN = "/dev/shm"  # every session has its own: no path is too long, and nobody else sees what is there
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10000  # below it live well-known services
ATTEMPTS = 100
SOCKET_NUMBERS = {channel: number for number, channel in enumerate(CHANNELS, 1)}  # in the names of ipc sockets


class Connection:
    """What a connection file says. Keys that the relay does not know are kept."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.transport = str(facts.get("transport", "tcp"))
        self.ip = str(facts.get("ip", "127.0.0.1"))
        self.key = str(facts.get("key", "")).encode()
        self.signature_scheme = str(facts.get("signature_scheme") or "hmac-sha256")
        if self.transport not in ("tcp", "ipc"):
            raise UsageError(f"The connection file asks for transport {self.transport!r}; Jupyter knows tcp and ipc.")

    @classmethod
    def read(cls, path: Path) -> Connection:
        """Reads a connection file. Raises UsageError when it is missing or is not one."""
        try:
            facts = json.loads(path.read_text())
        except OSError as error:
            raise UsageError(f"The connection file {path} cannot be read ({error.strerror}).") from error
        except ValueError as error:
            raise UsageError(f"{path} is not a connection file ({error}).") from error
        if not isinstance(facts, dict):
            raise UsageError(f"{path} is not a connection file.")
        return cls(facts)

    def write(self, path: Path) -> None:
        """Writes the file for its owner's eyes only (0600), whole or not at all."""
        _write_private(path, json.dumps(self.facts, indent=2))

    def port(self, channel: str) -> int:
        """The channel's port (a number in a file name where the transport is ipc); 0 = any."""
        return int(self.facts.get(f"{channel}_port") or 0)

    def endpoint(self, channel: str) -> str:
        """The channel's ZeroMQ address."""
        if self.transport == "ipc":
            return f"ipc://{self.ip}-{self.port(channel)}"
        return f"tcp://{self.ip}:{self.port(channel) or '*'}"

    @property
    def curve(self) -> tuple[bytes, bytes] | None:
        """The server's CURVE keys (public, secret; Z85), or None where the channels are not encrypted."""
        public, secret = self.facts.get("curve_publickey"), self.facts.get("curve_secretkey")
        return (str(public).encode(), str(secret).encode()) if public and secret else None

    def inner(self) -> Connection:
        """The same key on a loopback address and ports of the kernel's own, encrypted exactly if this one is.

        The address is random in 127/8 and the ports lie below the ephemeral range, so that nobody takes them while
        the kernel is away. Raises SetupError when no free ports are found.
        """
        ip, ports = _free_loopback_ports(len(CHANNELS))
        facts = {**self.facts, "transport": "tcp", "ip": ip}
        facts.update({f"{channel}_port": port for channel, port in zip(CHANNELS, ports, strict=True)})
        if self.curve:
            public, secret = zmq.curve_keypair()
            facts.update(curve_publickey=public.decode(), curve_secretkey=secret.decode())
        return Connection(facts)

    def inside(self, inner: InnerHalf) -> Connection:
        """The same key on `ipc` sockets that only the kernel's own session sees, where its inner half expects them."""
        facts = {**self.facts, "transport": "ipc", "ip": inner.prefix}
        facts.update({f"{channel}_port": number for channel, number in SOCKET_NUMBERS.items()})
        for key in ("curve_publickey", "curve_secretkey"):
            facts.pop(key, None)
        return Connection(facts)


@dataclass(frozen=True)
class InnerHalf:
    """Where the relay finds its inner half, the secret that both know, and where that finds the kernel's sockets."""

    ip: str
    port: int
    secret: bytes
    prefix: str

    @classmethod
    def choose(cls) -> InnerHalf:
        """An address that is free now, and will be while the session is away. Raises SetupError when none is found."""
        ip, (port,) = _free_loopback_ports(1)
        prefix = f"{SESSIONS_OWN}/torpor-{secrets.token_hex(8)}/kernel"
        return cls(ip, port, secrets.token_bytes(32), prefix)

    @classmethod
    def read(cls, path: Path) -> InnerHalf:
        """Reads what `write` wrote. Raises UsageError when it cannot be read."""
        try:
            ip, port, secret, prefix, *_ = path.read_text().split("\n")
            return cls(ip, int(port), bytes.fromhex(secret), prefix)
        except (OSError, ValueError) as error:
            raise UsageError(f"The relay's own file {path} cannot be read ({error}).") from error

    def write(self, path: Path) -> None:
        """Writes it for its owner's eyes only, as the inner half reads it."""
        numbers = [str(SOCKET_NUMBERS[channel]) for channel in INNER_CHANNELS]
        _write_private(path, "\n".join([self.ip, str(self.port), self.secret.hex(), self.prefix, *numbers]))


def _write_private(path: Path, content: str) -> None:
    draft = path.with_name(path.name + ".new")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    draft.rename(path)


def private_folder(connection_file: Path) -> Path:
    """The relay's own folder beside a connection file (0700): the inner connection file and what a next relay needs.

    Raises NotPermitted when something that is not the user's own private folder has its name.
    """
    folder = connection_file.parent / f"{connection_file.stem}.torpor"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotPermitted(f"{folder} is in the way: it is not a private folder of this user.", hint="Remove it.")
    return folder


def _free_loopback_ports(count: int) -> tuple[str, list[int]]:
    chance = random.SystemRandom()
    highest = int(EPHEMERAL_PORTS.read_text().split()[0]) if EPHEMERAL_PORTS.exists() else 32768
    if highest < LOWEST_PORT + 1000:
        highest = 32768  # an ephemeral range that begins this low leaves nothing below it
    ip = f"127.{chance.randint(1, 254)}.{chance.randint(0, 255)}.{chance.randint(2, 254)}"
    for _ in range(ATTEMPTS):
        ports = chance.sample(range(LOWEST_PORT, highest), count)
        if all(_is_free(ip, port) for port in ports):
            return ip, ports
    raise SetupError(f"No {count} free ports were found on {ip}.")


def _is_free(ip: str, port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind((ip, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise SetupError(f"No socket can be bound to {ip} ({error.strerror}).") from error
            return False
    return True
