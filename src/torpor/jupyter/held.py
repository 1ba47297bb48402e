"""Requests that wait for the kernel, and the notice in the waiting cell's own output area."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torpor.jupyter.agent_link import Progress
from torpor.jupyter.policy import is_silent
from torpor.jupyter.wire import Message
from torpor.model import State


@dataclass(frozen=True)
class Held:
    """One request that waits. `since` is monotonic, in seconds."""

    channel: str
    message: Message
    wakes: bool
    since: float = field(default_factory=time.monotonic)

    @property
    def is_cell(self) -> bool:
        """Whether this is code to run."""
        return self.message.header.msg_type == "execute_request"


class HeldRequests:
    """The requests that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[Held] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, held: Held) -> None:
        """Puts one at the end."""
        self._waiting.append(held)

    def wakes(self) -> bool:
        """Whether one of them needs the kernel."""
        return any(held.wakes for held in self._waiting)

    def first_visible_cell(self) -> Held | None:
        """The cell in whose output area a notice can be shown."""
        return next((held for held in self._waiting if held.is_cell and not is_silent(held.message)), None)

    def take(self, which: Callable[[Held], bool] = lambda _: True) -> list[Held]:
        """Takes out those that are asked for, in order."""
        taken = [held for held in self._waiting if which(held)]
        self._waiting = deque(held for held in self._waiting if not which(held))
        return taken


class Notice:
    """What the waiting cell shows: put up once, updated, and cleared before the kernel's own output comes."""

    def __init__(self, publish: Callable[[str, dict[str, Any], bytes], None]) -> None:
        self._publish = publish
        self._parent: bytes | None = None
        self._text = ""
        self._display = ""

    def show(self, cell: Held, text: str) -> None:
        """Shows or updates the notice."""
        if self._parent is None:
            self._parent, self._display = cell.message.raw_header, f"torpor-{uuid.uuid4().hex}"
            self._publish("status", {"execution_state": "busy"}, self._parent)
            self._send("display_data", text)
        elif text != self._text:
            self._send("update_display_data", text)

    def clear(self) -> None:
        """Leaves the output area as empty as it was."""
        if self._parent is not None:
            self._publish("clear_output", {"wait": False}, self._parent)
            self._parent = None

    def _send(self, msg_type: str, text: str) -> None:
        assert self._parent is not None
        self._text = text
        content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": self._display}}
        self._publish(msg_type, content, self._parent)


def notice_text(state: State, progress: Progress | None, *, reachable: bool) -> str:
    """The sentence for a cell that waits while its session is in this state."""
    if not reachable:
        return "Torpor's agent does not answer. This cell runs as soon as it is back."
    if state is State.HIBERNATING:
        return "This session is just being put to sleep. It wakes for this cell right after."
    if progress is None or not progress.total:
        return "Waking this session…"
    share = min(100 * progress.done // progress.total, 100)
    return f"Waking this session: {_size(progress.total)}, {share} % ({progress.phase})"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
