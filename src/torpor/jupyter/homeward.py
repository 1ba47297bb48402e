"""What the kernel sends, on its way to the clients."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from torpor.jupyter.kernel_link import KernelLink
from torpor.jupyter.ledger import Ledger
from torpor.jupyter.memory import Memory
from torpor.jupyter.sockets import ClientSide
from torpor.jupyter.voice import Voice
from torpor.jupyter.wire import Author, Message

REMEMBERED = frozenset({"kernel_info_reply", "debug_reply", "usage_reply"})


class Homeward:
    """Passes messages on to clients, and notes what they say of the kernel. Answers to the relay itself stay here."""

    def __init__(self, clients: ClientSide, voice: Voice, ledger: Ledger, memory: Memory, author: Author) -> None:
        self._clients = clients
        self._voice = voice
        self._ledger = ledger
        self._memory = memory
        self._author = author

    def take(self, link: KernelLink, channel: str, frames: list[zmq.Frame]) -> None:
        """One message of the kernel on this channel."""
        message = Message.parse(frames)
        if message is not None and link.side.may_repeat and self._author.signer.trusts(message):
            frames = self._author.again(message)
            message = Message.parse(frames)
        if channel == "iopub":
            link.heard_iopub()
            if message is None or self._is_for_clients(link, message):
                self._clients.publish(frames)
        elif message is not None:
            self._take_reply(link, channel, message)

    def _is_for_clients(self, link: KernelLink, message: Message) -> bool:
        if message.header.msg_type == "iopub_welcome":
            self._voice.kernel_welcomes()
            return False
        if link.is_own(message.parent):
            return False
        if message.header.msg_type == "status" and self._author.signer.trusts(message):
            self._ledger.published(message.parent.msg_id, str(message.content.get("execution_state")))
        return True

    def _take_reply(self, link: KernelLink, channel: str, reply: Message) -> None:
        if link.is_own(reply.parent):
            if self._author.signer.trusts(reply):
                self._memory.learn(reply, all_comms=True)
                link.answered(reply)
            return
        asked = None
        if channel == "stdin":
            self._ledger.asked_for_input(reply.parent.msg_id)
        else:
            asked = self._ledger.replied(reply.parent.msg_id)
        self._pass_reply(channel, reply, asked)

    def _pass_reply(self, channel: str, reply: Message, asked: Message | None) -> None:
        identities = reply.frames[: reply.delimiter] or (asked.identities if asked else [])
        frames: Sequence[bytes | zmq.Frame] = reply.frames[reply.delimiter :]
        if reply.header.msg_type in REMEMBERED and self._author.signer.trusts(reply):
            self._memory.learn(reply)
        elif reply.header.msg_type == "connect_reply":
            frames = self._author.rewrite(reply, self._memory.ports())
        self._clients.reply(channel, [*identities, *frames])
