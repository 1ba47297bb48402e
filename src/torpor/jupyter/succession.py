"""A relay takes the place of one that was killed, and with it clients lose nothing but a moment."""

from __future__ import annotations

from torpor.jupyter.bookmark import Bookmark, Mark
from torpor.jupyter.sockets import ClientSide
from torpor.jupyter.timers import Timers

CLIENTS_WITHIN = 10.0  # seconds for the clients of a relay that was killed to find the next one
LOOK_AGAIN = 0.05  # seconds between looks at who is back


class Succession:
    """Finds the place where the earlier relay stopped. What its clients are not back for yet waits for them."""

    def __init__(self, clients: ClientSide, timers: Timers) -> None:
        self._clients = clients
        self._timers = timers

    def begin(self, bookmark: Bookmark) -> Mark | None:
        """Where to go on; None when no earlier relay left a place to go on from."""
        mark = bookmark.read()
        if mark:
            self._clients.wait_for_clients(mark.subscribers)
            self._timers.set("gone", CLIENTS_WITHIN, self._clients.stop_waiting)
            self._look()
        return mark

    def _look(self) -> None:
        self._clients.send_late()
        if self._clients.is_waiting:
            self._timers.set("look for clients", LOOK_AGAIN, self._look)
