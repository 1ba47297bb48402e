"""What a request means for a kernel that is away: pure judgements about single messages.

`effect` decides whether a message wakes the kernel; `is_activity` whether it counts as use of it. The two differ:
somebody who searches the history needs the kernel, but has not used it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import msgspec

from torpor.jupyter.wire import Message


class Effect(Enum):
    """What the relay does with a request while the kernel is away."""

    WAKE = auto()  # held, and the kernel is woken for it
    HOLD = auto()  # held until something else wakes the kernel
    ANSWER = auto()  # answered from memory; held where memory has nothing
    INTERRUPT = auto()  # cancels cells that are held
    SHUTDOWN = auto()  # ends the session, its checkpoints are kept


class CommJudge:
    """Tells a widget's work from the questions that every page asks when it is loaded.

    A page that loads opens a control comm, asks it (or each widget) for its state, and closes it again.
    """

    def __init__(self) -> None:
        self._control_comms: set[str] = set()

    def only_asks_for_state(self, message: Message) -> bool:
        """Whether a comm message asks for state that the kernel already has, and changes nothing."""
        try:
            comm = _decode_comm(message.raw_content)
        except msgspec.MsgspecError:
            return False
        if message.header.msg_type == "comm_open":
            if comm.target_name != WIDGET_CONTROL:
                return False
            self._control_comms.add(comm.comm_id)
            return True
        if comm.comm_id in self._control_comms:
            if message.header.msg_type == "comm_close":
                self._control_comms.discard(comm.comm_id)
            return True
        return message.header.msg_type == "comm_msg" and _method(comm.data) in STATE_REQUESTS

    def effect(self, message: Message) -> Effect:
        """What a comm message does to a kernel that is away."""
        return Effect.HOLD if self.only_asks_for_state(message) else Effect.WAKE

    def is_activity(self, message: Message) -> bool:
        """Whether this message is use of the kernel by somebody."""
        msg_type = message.header.msg_type
        if msg_type in COMM_TYPES:
            return not self.only_asks_for_state(message)
        return msg_type in ACTIVITY


WIDGET_CONTROL = "jupyter.widget.control"
STATE_REQUESTS = frozenset({"request_state", "request_states"})
COMM_TYPES = frozenset({"comm_open", "comm_msg", "comm_close"})
ACTIVITY = frozenset({"execute_request", "complete_request", "inspect_request", "is_complete_request", "input_reply"})
_EFFECTS = {
    "kernel_info_request": Effect.ANSWER,
    "comm_info_request": Effect.ANSWER,
    "connect_request": Effect.ANSWER,
    "usage_request": Effect.ANSWER,
    "create_subshell_request": Effect.HOLD,
    "delete_subshell_request": Effect.HOLD,
    "list_subshell_request": Effect.HOLD,
    "interrupt_request": Effect.INTERRUPT,
    "shutdown_request": Effect.SHUTDOWN,
}


def effect(message: Message, comms: CommJudge) -> Effect:
    """What a request does to a kernel that is away. What is not known here was asked for by somebody: it wakes."""
    msg_type = message.header.msg_type
    if msg_type in COMM_TYPES:
        return comms.effect(message)
    if msg_type == "debug_request":
        return Effect.ANSWER if message.content.get("command") == "debugInfo" else Effect.WAKE
    if msg_type == "history_request":  # every page and every console that is opened asks for the last lines
        return Effect.HOLD if message.content.get("hist_access_type") == "tail" else Effect.WAKE
    return _EFFECTS.get(msg_type, Effect.WAKE)


def effect_at_work(usual: Effect, channel: str) -> Effect:
    """What a request does to a kernel that was saved in the middle of a cell: as if it were still at it.

    It would not come to questions on shell before its cell has ended; and an interrupt is for that cell.
    """
    if usual is Effect.INTERRUPT:
        return Effect.WAKE
    return Effect.HOLD if usual is Effect.ANSWER and channel == "shell" else usual


def is_silent(message: Message) -> bool:
    """Whether an execute_request wants no output of its own (a front end's, not a person's)."""
    return bool(message.content.get("silent", False))


class _CommContent(msgspec.Struct):
    comm_id: str = ""
    target_name: str = ""
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _CommData(msgspec.Struct):
    method: Any = None


_decode_comm = msgspec.json.Decoder(_CommContent).decode
_decode_data = msgspec.json.Decoder(_CommData).decode


def _method(data: msgspec.Raw) -> str:
    try:
        method = _decode_data(data).method
    except msgspec.MsgspecError:
        return ""
    return method if isinstance(method, str) else ""
