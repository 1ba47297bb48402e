"""The kernel's last words: what the relay answers while the kernel is away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from torpor.jupyter.connection import CHANNELS, Connection
from torpor.jupyter.wire import Message


class _Words(msgspec.Struct):
    kernel_info: dict[str, Any] | None = None
    comms: dict[str, Any] | None = None  # comm id -> {"target_name": ...}
    debug_info: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None


class Memory:
    """Last replies to the questions that a kernel need not be woken for, kept in a file for the next relay."""

    def __init__(self, file: Path, clients: Connection) -> None:
        self._file = file
        self._clients = clients
        self._words = _Words()

    def load(self) -> None:
        """Takes over what an earlier relay of the same kernel knew. A damaged file is as good as none."""
        try:
            self._words = msgspec.json.decode(self._file.read_bytes(), type=_Words)
        except (OSError, msgspec.MsgspecError):
            self._words = _Words()

    def save(self) -> None:
        """Writes the file, whole or not at all. Raises OSError."""
        draft = self._file.with_name(self._file.name + ".new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self._words))
        draft.rename(self._file)

    @property
    def knows_kernel(self) -> bool:
        """Whether a kernel_info_reply was ever seen."""
        return self._words.kernel_info is not None

    def learn(self, reply: Message, *, all_comms: bool = False) -> None:
        """Keeps a genuine reply of the kernel. `all_comms`: a comm_info_reply that names every target."""
        content = reply.content
        if content.get("status", "ok") != "ok":
            return
        match reply.header.msg_type:
            case "kernel_info_reply":
                self._words.kernel_info = content
            case "comm_info_reply" if all_comms and isinstance(content.get("comms"), dict):
                self._words.comms = content["comms"]
            case "debug_reply" if content.get("command") == "debugInfo":
                self._words.debug_info = content
            case "usage_reply":
                self._words.usage = content

    def answer(self, request: Message) -> tuple[str, dict[str, Any]] | None:
        """Type and content of the reply that the kernel would give; None when it never said."""
        match request.header.msg_type:
            case "kernel_info_request":
                return _known("kernel_info_reply", self._words.kernel_info)
            case "comm_info_request":
                return _known("comm_info_reply", self._comms(request.content.get("target_name")))
            case "connect_request":
                return "connect_reply", self.ports()
            case "debug_request":
                info = self._words.debug_info
                return _known("debug_reply", info and {**info, "request_seq": request.content.get("seq")})
            case "usage_request":
                away = {"kernel_cpu": 0.0, "kernel_memory": 0}
                return "usage_reply", {**(self._words.usage or {"hostname": os.uname().nodename}), **away}
        return None

    def ports(self) -> dict[str, Any]:
        """Content of a connect_reply: the ports that clients connect to, never the kernel's own."""
        return {"status": "ok", **{f"{channel}_port": self._clients.port(channel) for channel in CHANNELS}}

    def _comms(self, target: Any) -> dict[str, Any] | None:
        if self._words.comms is None:
            return None
        chosen = {
            comm: facts
            for comm, facts in self._words.comms.items()
            if target is None or (isinstance(facts, dict) and facts.get("target_name") == target)
        }
        return {"status": "ok", "comms": chosen}


def _known(msg_type: str, content: dict[str, Any] | None) -> tuple[str, dict[str, Any]] | None:
    return None if content is None else (msg_type, content)
