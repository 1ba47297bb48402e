"""What is in flight between clients and the kernel, and what that says about the kernel's state.

The two differ: a page that is loaded asks the kernel for this and that, but nobody has used the kernel by it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torpor.jupyter.wire import Message
from torpor.model import Kernel

COMM_TYPES = frozenset({"comm_open", "comm_msg", "comm_close"})
REPLY_GRACE = 5.0  # seconds that a reply may follow the idle status of its request; then there is none


@dataclass
class Ledger:
    """Requests that the kernel has not answered, and what it says of itself. Starts as a kernel that is starting."""

    requests: dict[str, tuple[str, Message]] = field(default_factory=dict)  # message id -> channel, request
    comms: set[str] = field(default_factory=set)  # comm messages, which get no reply: until the kernel was idle again
    busy_for: set[str] = field(default_factory=set)  # parents whose status is busy
    idle_since: dict[str, float] = field(default_factory=dict)  # requests worked off whose reply is on its way
    small_talk: set[str] = field(default_factory=set)  # requests that are nobody's use of the kernel: a page was loaded
    input_for: str | None = None  # parent of the input_request that nobody has answered
    last_message: float = 0.0  # last real message of a client, seconds since the epoch
    started: bool = False
    _state: str = "starting"
    _since: float = field(default_factory=time.time)

    def noticed(self, message: Message, *, is_use: bool) -> None:
        """A client sent this; `is_use` tells whether somebody uses the kernel by it."""
        if is_use:
            self.last_message = time.time()
        else:
            self.small_talk.add(message.header.msg_id)

    def forwarded(self, channel: str, message: Message) -> None:
        """A client's message went to the kernel."""
        header = message.header
        if header.msg_type == "input_reply":
            self.input_for = None
        elif header.msg_type in COMM_TYPES:
            self.comms.add(header.msg_id)
        else:
            self.requests[header.msg_id] = (channel, message)

    def replied(self, parent: str) -> Message | None:
        """The kernel answered this request, which is given back (None: nobody is known to have asked)."""
        if self.input_for == parent:
            self.input_for = None
        self.idle_since.pop(parent, None)
        asked = self.requests.pop(parent, (None, None))[1]
        self._forget_small_talk(parent)
        return asked

    def asked_for_input(self, parent: str) -> None:
        """The kernel waits for a person."""
        self.input_for = parent

    def published(self, parent: str, execution_state: str) -> None:
        """A status message of the kernel."""
        if execution_state == "busy":
            self.busy_for.add(parent)
        elif execution_state == "idle":
            self.busy_for.discard(parent)
            self.comms.clear()  # a comm message that is handled while a cell runs gets no status of its own
            if parent in self.requests:
                self.idle_since[parent] = time.monotonic()
            self.small_talk &= self._all_in_flight()

    def connected(self) -> None:
        """Fresh sockets lead to the kernel: nothing that was in flight before can still arrive."""
        self.started = True
        self.requests.clear()
        self.comms.clear()
        self.busy_for.clear()
        self.idle_since.clear()
        self.input_for = None

    @property
    def in_flight(self) -> int:
        """Requests not yet answered, comm messages not yet worked off, and work that the kernel says it does."""
        overdue = time.monotonic() - REPLY_GRACE
        for request in [request for request, since in self.idle_since.items() if since < overdue]:
            self.replied(request)  # a kernel works off a request that it does not know, and sends no reply
        return len(self._all_in_flight())

    def report(self, held: int, *, busy: bool = False, lossless: bool = False) -> Kernel:
        """What the agent is told; `held` requests wait in the relay, `busy` with what an earlier relay forwarded."""
        is_used = bool(self.in_flight and self._all_in_flight() - self.small_talk)
        state = "starting" if not self.started else "busy" if busy or is_used else "idle"
        if state != self._state:
            self._state, self._since = state, time.time()
        return Kernel(
            execution_state=state,
            since=self._since,
            queued=len(self.requests.keys() - self.small_talk) + held,
            waiting_for_input=self.input_for is not None,
            last_message=self.last_message,
            lossless=lossless,
        )

    def _all_in_flight(self) -> set[str]:
        return self.requests.keys() | self.comms | self.busy_for

    def _forget_small_talk(self, parent: str) -> None:
        if parent not in self._all_in_flight():
            self.small_talk.discard(parent)
