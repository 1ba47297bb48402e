"""Connection files: the one that Jupyter wrote for its clients, and the inner one for the kernel behind the relay."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import socket
import stat
from pathlib import Path
from typing import Any

import zmq

from torpor.errors import NotPermitted, SetupError, UsageError

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10000  # below it live well-known services
ATTEMPTS = 100


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
        draft = path.with_name(path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(self.facts, file, indent=2)
        draft.rename(path)

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
