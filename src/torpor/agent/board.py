"""What the agent knows and does not need to keep: kernels' states, relays, verdicts, and who waits for news.

All of it is told anew after a restart; until then it is unknown, and unknown counts as busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from torpor.idle.verdict import Verdict
from torpor.model import Kernel, Session


class Relay(msgspec.Struct):
    """The relay of one kernel session: its process, when it last spoke, and how many of its watches are waiting."""

    pid: int
    heard: float
    watching: int = 0


class Board:
    """Belongs to the event loop: only `notify` may be called from elsewhere, through `call_soon_threadsafe`."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.relays: dict[str, Relay] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.activity: dict[str, float] = {}  # last use, seconds since the epoch
        self.resumed: dict[str, float] = {}  # end of the last resume
        self._news: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def notify(self, session_id: str) -> None:
        """Wakes everybody who waits for news of this session."""
        self._news.pop(session_id, asyncio.Event()).set()

    def notify_all(self) -> None:
        """Wakes everybody who waits for any news."""
        for session_id in list(self._news):
            self.notify(session_id)

    async def news(self, session_id: str, timeout: float) -> None:
        """Returns at the next `notify`, or after `timeout` seconds."""
        event = self._news[session_id]
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            return

    def active(self, session_id: str, when: float) -> None:
        """Notes a use; an earlier one than is known changes nothing."""
        self.activity[session_id] = max(when, self.activity.get(session_id, 0.0))

    def relay_spoke(self, session_id: str, pid: int) -> None:
        """Notes that the relay told something; the newest process that does is the session's relay."""
        relay = self.relays.get(session_id)
        if relay is None or relay.pid != pid:
            self.relays[session_id] = Relay(pid, time.time())
        else:
            relay.heard = time.time()

    @contextmanager
    def watching(self, session_id: str, pid: int) -> Iterator[None]:
        """Counts a watch as the relay's presence while it waits, if it is the relay that watches."""
        relay = self.relays.get(session_id)
        if relay is None or relay.pid != pid:
            yield
            return
        relay.watching += 1
        try:
            yield
        finally:
            relay.watching -= 1
            relay.heard = time.time()

    def relay_heard(self, session: Session) -> float:
        """When the session's relay was last known to be there; 0 when none ever was."""
        relay = self.relays.get(session.id)
        if relay is None:
            return session.relay_heard
        return time.time() if relay.watching else relay.heard

    def kernel(self, session: Session) -> Kernel | None:
        """What the relay last said, as fresh as the relay's presence."""
        told = self.kernels.get(session.id)
        if told is None:
            return None
        return msgspec.structs.replace(told, heard=max(told.heard, self.relay_heard(session)))

    def forget(self, session_id: str) -> None:
        """Drops everything about a session that is gone, and wakes those who waited for it."""
        for facts in (self.kernels, self.relays, self.verdicts, self.activity, self.resumed):
            facts.pop(session_id, None)
        self.notify(session_id)
