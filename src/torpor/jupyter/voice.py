"""What the relay says to clients in the kernel's place."""

from __future__ import annotations

from typing import Any

from torpor.jupyter.held import Held
from torpor.jupyter.sockets import ClientSide, send
from torpor.jupyter.wire import Author, Message

PREFIX = b"kernel.torpor."


class Voice:
    """Replies and publishes on the client-facing channels, signed like everything else."""

    def __init__(self, clients: ClientSide, author: Author) -> None:
        self._clients = clients
        self._author = author
        self._subscriptions: list[bytes] = []
        self._welcomes = False

    def publish(self, msg_type: str, content: dict[str, Any], parent: bytes = b"{}") -> None:
        """Publishes on iopub; `parent` is the header that caused it."""
        frames = self._author.compose(msg_type, content, parent)
        self._clients.publish([PREFIX + msg_type.encode(), *frames])

    def reply(self, channel: str, request: Message, msg_type: str, content: dict[str, Any]) -> None:
        """Answers a request as kernels do: busy, reply, idle."""
        self.publish("status", {"execution_state": "busy"}, request.raw_header)
        self._reply_only(channel, request, msg_type, content)
        self.publish("status", {"execution_state": "idle"}, request.raw_header)

    def state(self, execution_state: str) -> None:
        """Tells all clients how the kernel is. A page that is loaded shows no state that is said of its questions."""
        self.publish("status", {"execution_state": execution_state})

    def fail(self, requests: list[Held], name: str, value: str) -> None:
        """Answers requests that will not run: the first cell with an error that it shows, later ones as aborted."""
        error = {"ename": name, "evalue": value, "traceback": [f"{name}: {value}" if value else name]}
        failed = False
        for held in requests:
            request = held.message
            self.publish("status", {"execution_state": "busy"}, request.raw_header)
            content: dict[str, Any] = {"status": "error", **error}
            if held.is_cell and failed:
                content = {"status": "aborted"}
            elif held.is_cell:
                failed = True
                self.publish("error", error, request.raw_header)
                content.update(execution_count=None, user_expressions={}, payload=[])
            kind, _, is_request = request.header.msg_type.rpartition("_")
            if is_request == "request":
                self._reply_only(held.channel, request, f"{kind}_reply", content)
            self.publish("status", {"execution_state": "idle"}, request.raw_header)

    def shutdown(self, channel: str, request: Message) -> None:
        """Answers a shutdown_request, and tells all clients, as kernels do."""
        content = {"status": "ok", "restart": bool(request.content.get("restart", False))}
        self.reply(channel, request, "shutdown_reply", content)
        self.publish("shutdown_reply", content, request.raw_header)

    def subscribed(self, topic: bytes) -> None:
        """A client subscribed; it is welcomed where the kernel is one that welcomes."""
        if self._welcomes:
            self._welcome(topic)
        else:
            self._subscriptions.append(topic)

    def kernel_welcomes(self) -> None:
        """The kernel welcomed the relay's own subscription: clients expect the same."""
        self._welcomes = True
        for topic in self._subscriptions:
            self._welcome(topic)
        self._subscriptions.clear()

    def _welcome(self, topic: bytes) -> None:
        content = {"subscription": topic.decode(errors="replace")}
        frames = self._author.compose("iopub_welcome", content)
        send(self._clients.sockets["iopub"], [topic, *frames] if topic else frames)

    def _reply_only(self, channel: str, request: Message, msg_type: str, content: dict[str, Any]) -> None:
        frames = self._author.compose(msg_type, content, request.raw_header)
        self._clients.reply(channel, [*request.identities, *frames])
