"""The keeper's only loop: descriptors, timers and ended children, one thread, nothing that blocks."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import signal
import time
from collections.abc import Callable

HUNG_UP = select.EPOLLHUP | select.EPOLLERR


class Loop:
    """Calls back when a descriptor is ready (`ready(events)`, bits of epoll), a time is reached, a child has ended."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._running = True
        self._children_ended: Callable[[], None] = lambda: None

    def watch(self, fd: int, ready: Callable[[int], None], *, read: bool = True, write: bool = False) -> None:
        """Watch `fd`, or change what it is watched for."""
        events = (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)
        if fd in self._ready:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._ready[fd] = ready

    def forget(self, fd: int) -> None:
        """Stop watching `fd`, which may not be watched at all; to be called before it is closed."""
        if self._ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` once, after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), action))

    def on_children_ended(self, action: Callable[[], None]) -> None:
        """Call `action` whenever a child, born or inherited, may have ended."""
        self._children_ended = action
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.watch(reader, lambda _events: self._drain_wakeups(reader))

    def stop(self) -> None:
        """Return from `run` after the current callbacks."""
        self._running = False

    def run(self) -> None:
        """Serve until `stop`."""
        while self._running:
            for fd, events in self._epoll.poll(self._seconds_to_next_timer()):
                ready = self._ready.get(fd)  # an earlier callback of this turn may have forgotten it
                if ready is not None:
                    ready(events)
            self._run_timers()

    def _seconds_to_next_timer(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _drain_wakeups(self, reader: int) -> None:
        os.read(reader, 4096)
        self._children_ended()
