"""The way to one life of the kernel's process, and the proof that it carries messages in both directions."""

from __future__ import annotations

import logging
import time
from typing import Any

from torpor.jupyter.inner_side import InnerSide
from torpor.jupyter.sockets import KernelSide
from torpor.jupyter.wire import Author, Header, Message

AGAIN_AFTER_REPLY = 0.02  # seconds: a reply came and no status with it, so iopub was not subscribed yet
AGAIN_AFTER_SILENCE = 2.0  # seconds: the kernel starts, or the connection was lost on the way
GIVE_UP_IOPUB = 15.0  # seconds after the first reply: a kernel that answers and publishes nothing
log = logging.getLogger(__name__)


class KernelLink:
    """Sockets to the kernel. `proven` becomes true when nothing that the kernel says can be lost any more.

    The proof is a kernel_info_request of the relay's own, repeated until its status messages come back on iopub, and
    the end of the handshake on stdin. It takes the control channel, where it does not become the parent of what the
    kernel's threads print; a kernel that is silent there is asked on shell, too. `questions` is where it answers.
    """

    def __init__(self, side: KernelSide | InnerSide, author: Author, lease: int) -> None:
        self.lease = lease
        self.side = side
        self.proven = False
        self._author = author
        self.questions = "control"
        self._asked: dict[str, tuple[str, str]] = {}  # ids of the relay's own requests not answered -> channel, type
        self._heard_reply = 0.0
        self._heard_iopub = False
        self._probes = 0
        self._shell_question = ""

    def probe(self) -> float:
        """Sends the next question of the proof; the answer is in how many seconds to ask again."""
        self.ask("control", "kernel_info_request")
        self._probes += 1
        if self._probes > 1 and not self._heard_reply:
            self.ask("shell", "kernel_info_request")
        return AGAIN_AFTER_SILENCE

    def ask_shell(self) -> None:
        """Asks the kernel's main thread; `is_asking_shell` until it has worked off what it had to do before."""
        self._shell_question = self.ask("shell", "kernel_info_request")

    @property
    def is_asking_shell(self) -> bool:
        """Whether the answer to `ask_shell` has not come yet."""
        return self._shell_question in self._asked

    def ask(self, channel: str, msg_type: str, content: dict[str, Any] | None = None) -> str:
        """Sends a request of the relay's own; the answer is its message id."""
        frames = self._author.compose(msg_type, content or {})
        message_id = Message.header_of(frames).msg_id
        self._asked[message_id] = channel, msg_type
        self.side.send(channel, frames)
        return message_id

    def is_own(self, parent: Header) -> bool:
        """Whether a message answers the relay and is not for clients."""
        return parent.session == self._author.session

    def answered(self, reply: Message) -> None:
        """A reply to the relay came."""
        channel, _ = self._asked.pop(reply.parent.msg_id, ("", ""))
        if channel == "control" or (channel == "shell" and not self._heard_reply):
            self.questions = channel
        self._heard_reply = self._heard_reply or time.monotonic()

    def is_waiting_for(self, msg_type: str) -> bool:
        """Whether a request of this type is not answered yet, and can be expected to be."""
        silent = {"control"} - {self.questions}
        return any(asked == msg_type and channel not in silent for channel, asked in self._asked.values())

    def heard_iopub(self) -> None:
        """Something came on iopub: it is subscribed."""
        self._heard_iopub = True

    def check(self) -> bool:
        """Whether the proof is complete now; it stays so."""
        if self._heard_reply and not self.proven:
            heard_all = self._heard_iopub and self.side.stdin_is_connected
            if not heard_all and time.monotonic() - self._heard_reply > GIVE_UP_IOPUB:
                silent = "stdin" if self._heard_iopub else "iopub"
                log.warning("This kernel answers requests, but its %s channel is silent; going on without it.", silent)
                heard_all = True
            self.proven = heard_all
        return self.proven

    @property
    def is_usable(self) -> bool:
        """Whether what is sent now arrives, and what comes back is heard."""
        return self.proven and self.side.is_connected

    @property
    def wants_status(self) -> bool:
        """Whether a reply came and its status did not: ask again soon."""
        return bool(self._heard_reply) and not self._heard_iopub

    def close(self) -> None:
        """Closes the sockets."""
        self.side.close()
