"""What tests say to kernels, and how they collect what comes back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

PATIENCE = 60.0


@dataclass
class Answer:
    """All that came back for one request."""

    reply: dict[str, Any] = field(default_factory=dict)
    published: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> str:
        return str(self.reply["content"]["status"])

    @property
    def stdout(self) -> str:
        return "".join(m["content"]["text"] for m in self.published if m["msg_type"] == "stream")

    @property
    def result(self) -> str:
        (result,) = [m["content"]["data"]["text/plain"] for m in self.published if m["msg_type"] == "execute_result"]
        return str(result)

    @property
    def kinds(self) -> list[str]:
        return [m["msg_type"] for m in self.published]


def run(client: BlockingKernelClient, code: str, **settings: Any) -> Answer:
    return collect(client, client.execute(code, **settings))


def collect(client: BlockingKernelClient, request: str, channel: str = "shell") -> Answer:
    """Waits for the reply and for the idle status of this request."""
    answer = Answer()
    deadline = time.monotonic() + PATIENCE
    read = client.get_shell_msg if channel == "shell" else client.get_control_msg
    while True:
        reply = read(timeout=deadline - time.monotonic())
        if reply["parent_header"].get("msg_id") == request:
            answer.reply = reply
            break
    while True:
        message = client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["parent_header"].get("msg_id") == request:
            answer.published.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return answer


def send(client: BlockingKernelClient, channel: str, msg_type: str, content: dict[str, Any]) -> str:
    message = client.session.msg(msg_type, content)
    getattr(client, f"{channel}_channel").send(message)
    return str(message["header"]["msg_id"])


def is_silent(client: BlockingKernelClient, seconds: float = 0.5) -> bool:
    """Whether no reply comes; for showing that a request is held, not for waiting."""
    try:
        client.get_shell_msg(timeout=seconds)
    except Empty:
        return True
    return False
