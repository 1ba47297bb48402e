"""Requests that came while the kernel cannot take them, and what is done for them: wake it, say so, or give up."""

from __future__ import annotations

import logging
import time

from torpor.errors import AgentUnreachable, Conflict, TorporError
from torpor.jupyter.agent_link import AgentLink, Progress, Seen
from torpor.jupyter.held import Held, HeldRequests, Notice, notice_text
from torpor.jupyter.timers import Timers
from torpor.jupyter.voice import Voice
from torpor.jupyter.wire import Message
from torpor.model import State

NOTICE_AFTER = 0.5  # seconds that a cell waits before it says so
TRY_AGAIN_AFTER = 1.0  # seconds after a resume that was refused because something else was under way
AWAY = frozenset({State.SUSPENDED, State.HIBERNATED})
log = logging.getLogger(__name__)


class Waking:
    """Holds requests in order. `session` and `reachable` are kept up to date by the relay."""

    def __init__(self, agent: AgentLink, timers: Timers, voice: Voice) -> None:
        self.held = HeldRequests()
        self.session = Seen("", State.STARTING, -1)
        self.reachable = True
        self.has_notices = False  # a kernel that starts for the first time says nothing, as without Torpor
        self.given_up = False  # the session is being ended
        self.is_interrupt_held = False  # somebody interrupted a cell that the kernel was saved in the middle of
        self._agent = agent
        self._timers = timers
        self._voice = voice
        self._notice = Notice(voice.publish)
        self._resuming = False
        self._progress: Progress | None = None

    def hold(self, channel: str, message: Message, *, wakes: bool) -> None:
        """Keeps a request until the kernel can take it, and wakes the kernel if it is worth that."""
        self.held.add(Held(channel, message, wakes))
        self.consider()

    def consider(self) -> None:
        """Wakes a kernel that is away if somebody waits for it; called whenever one of the two may have changed."""
        if self.has_notices and self.held.first_visible_cell():
            self._timers.set_if_unset("notice", NOTICE_AFTER, self._show_notice)
        is_wanted = (self.held.wakes() or self.is_interrupt_held) and not self.given_up
        if self.session.state in AWAY and is_wanted and not self._resuming:
            self._resuming = True
            self._progress = None
            self._agent.operation("resume")

    def on_progress(self, progress: Progress) -> None:
        """The resume has come this far."""
        self._progress = progress

    def on_resume_ended(self, error: TorporError | None) -> None:
        """The resume that was asked for is over; requests that cannot be served are told why."""
        self._resuming = False
        if error is None:
            return
        if isinstance(error, AgentUnreachable | Conflict):
            log.info("resume: %s", error)
            self._timers.set("again", TRY_AGAIN_AFTER, self.consider)
            return
        self._notice.clear()
        self._voice.fail(self.held.take(lambda held: held.wakes), "SessionNotResumed", str(error))

    def hold_interrupt(self) -> None:
        """Keeps an interrupt for the cell that the kernel was saved in, and wakes the kernel for it."""
        self.is_interrupt_held = True
        self.consider()

    def cancel_cells(self) -> None:
        """Interrupts cells that have not begun."""
        self._notice.clear()
        self._voice.fail(self.held.take(lambda held: held.is_cell), "KeyboardInterrupt", "")

    def release(self) -> list[Held]:
        """All that waited, in order: the kernel can take it now."""
        self._notice.clear()
        self._timers.cancel("notice")
        self._progress = None
        return self.held.take()

    def _show_notice(self) -> None:
        cell = self.held.first_visible_cell()
        if cell is None:
            return
        if time.monotonic() - cell.since >= NOTICE_AFTER:
            self._notice.show(cell, notice_text(self.session.state, self._progress, reachable=self.reachable))
        self._timers.set("notice", NOTICE_AFTER, self._show_notice)
