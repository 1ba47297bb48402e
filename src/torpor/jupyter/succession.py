"""A relay takes the place of one that was killed, and with it clients lose nothing but a moment."""

from __future__ import annotations

from torpor.jupyter.bookmark import Bookmark, Mark
from torpor.jupyter.sockets import ClientSide
from torpor.jupyter.timers import Timers

CLIENTS_WITHIN = 5.0  # seconds for the clients of a relay that was killed to find the next one
REPLY_AGAIN = 0.05  # seconds between attempts to reach them


class Succession:
    """Finds the place where the earlier relay stopped, and sees that its clients are back before they miss anything."""

    def __init__(self, clients: ClientSide, timers: Timers) -> None:
        self._clients = clients
        self._timers = timers

    def begin(self, bookmark: Bookmark) -> Mark | None:
        """Where to go on; None when no earlier relay left a place to go on from."""
        mark = bookmark.read()
        if mark:
            self._clients.await_subscribers(mark.subscribers, CLIENTS_WITHIN)
            self._clients.waits_for_clients = True
            self._timers.set("late", CLIENTS_WITHIN, self._give_up)
            self._reply_again()
        return mark

    def _reply_again(self) -> None:
        self._clients.reply_again()
        if self._clients.waits_for_clients:
            self._timers.set("reply", REPLY_AGAIN, self._reply_again)

    def _give_up(self) -> None:
        self._clients.waits_for_clients = False
