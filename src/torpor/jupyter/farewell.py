"""How the relay's life ends: with its session, at Jupyter's wish, or because nobody is left who wants it."""

from __future__ import annotations

from collections.abc import Callable

from torpor.jupyter.agent_link import AgentLink, OperationEnded, Seen
from torpor.jupyter.timers import Timers
from torpor.model import State

LEAVE_AFTER = 10.0  # seconds that the agent may take to end a session before the relay goes without its word
LOOK_AGAIN = 2.0  # seconds between looks at a deserted kernel that is busy
UNKNOWN_STATUS = 1


class Farewell:
    """Knows the exit status once it is time to exit."""

    def __init__(self, agent: AgentLink, timers: Timers) -> None:
        self.exit_status: int | None = None
        self.kept = False  # the session lives on without a relay
        self.session = Seen("", State.STARTING, -1)
        self._agent = agent
        self._timers = timers
        self._wanted: int | None = None
        self._expected = False
        self._is_deserted = False

    @property
    def started(self) -> bool:
        """Whether the session is being ended."""
        return self._wanted is not None

    def expect(self) -> None:
        """The kernel was asked to shut down: that it exits is no accident, even when nobody knows its status."""
        self._expected = True

    def end(self, exit_status: int) -> None:
        """Ends the session; its checkpoints are kept. Then the relay exits with this status."""
        if self._wanted is None:
            self._wanted = exit_status
            self._agent.end()
            self._timers.set("leave", LEAVE_AFTER, self._leave)

    def over(self, exit_status: int | None) -> None:
        """The session has ended; `exit_status` is the kernel's, None when unknown."""
        if self._wanted is not None:
            self.exit_status = self._wanted
        elif exit_status is not None:
            self.exit_status = exit_status
        else:
            self.exit_status = 0 if self._expected else UNKNOWN_STATUS

    def deserted(self, is_idle: Callable[[], bool]) -> None:
        """Jupyter has gone and never said that it does not want the kernel any more: the session is put to sleep."""
        if not self._is_deserted:
            self._is_deserted = True
            self._look(is_idle)

    def on_operation_ended(self, event: OperationEnded) -> None:
        """An operation that was asked for here has ended."""
        if event.kind == "end":
            self._leave()
        elif event.kind == "hibernate" and event.error is None:
            self.kept = True
            self.exit_status = 0

    def _look(self, is_idle: Callable[[], bool]) -> None:
        if self.session.state in (State.HIBERNATED, State.SUSPENDED):
            self.kept = True
            self.exit_status = 0
            return
        if self.session.state is State.RUNNING and is_idle():
            self._agent.operation("hibernate")
        self._timers.set("look", LOOK_AGAIN, lambda: self._look(is_idle))

    def _leave(self) -> None:
        self.exit_status = self._wanted if self._wanted is not None else UNKNOWN_STATUS
