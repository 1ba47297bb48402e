"""The relay: the process that Jupyter believes to be the kernel, and that stays when the kernel is away.

One thread moves messages between clients and the kernel; nothing in it waits. While the kernel is reachable and
proven (`live`), messages pass through as they are. Otherwise requests are answered from memory, or held in order, and
forwarded once the kernel is proven again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from torpor.jupyter.absence import Absence
from torpor.jupyter.agent_link import AgentLink, Gone, LinkEvent, Mailbox, OperationEnded, Progress, Seen, Unreachable
from torpor.jupyter.bookmark import Bookmark, Mark
from torpor.jupyter.claim import Claim
from torpor.jupyter.connection import Connection, InnerHalf
from torpor.jupyter.farewell import Farewell
from torpor.jupyter.held import Held
from torpor.jupyter.homeward import Homeward
from torpor.jupyter.inner_side import InnerSide
from torpor.jupyter.kernel_link import AGAIN_AFTER_REPLY, KernelLink
from torpor.jupyter.ledger import Ledger
from torpor.jupyter.loss import Loss
from torpor.jupyter.memory import Memory
from torpor.jupyter.policy import CommJudge
from torpor.jupyter.quiesce import Quiesce
from torpor.jupyter.reporter import Reporter
from torpor.jupyter.sockets import AT_ONCE, REQUEST_CHANNELS, ClientSide, KernelSide, receive_available
from torpor.jupyter.succession import Succession
from torpor.jupyter.timers import Timers
from torpor.jupyter.voice import Voice
from torpor.jupyter.waking import AWAY, Waking
from torpor.jupyter.wire import Author, Message, Signer
from torpor.model import Kernel, State

RECONNECT = 0.02  # seconds between attempts to reach the inner half
KILLED_WITHIN = 2.0  # seconds after an interrupt within which Jupyter kills a kernel that it wants anew
RUNS = frozenset({State.RUNNING, State.CHECKPOINTING})
OVER = frozenset({State.ENDED, State.FAILED})
log = logging.getLogger(__name__)


class Relay:
    """Serves one session until it is over. `inner` leads to the kernel, `clients` is already bound.

    With an inner half the way to the kernel outlives hibernations; else it is made anew after each.
    `farewell` knows how it ended, `waking` what waits for the kernel.
    """

    def __init__(
        self,
        clients: ClientSide,
        outer: Connection,
        inner: Connection | InnerHalf,
        agent: AgentLink,
        mailbox: Mailbox,
        claim: Claim,
    ) -> None:
        self._clients = clients
        self._claim = claim
        self._inner = inner
        self._agent = agent
        self._mailbox = mailbox
        self._signer = Signer(outer.key, outer.signature_scheme)
        self._author = Author(self._signer)
        self._voice = Voice(clients, self._author)
        self._memory = Memory(claim.memory_file, outer)
        self._memory.load()
        self._ledger = Ledger()
        self._homeward = Homeward(clients, self._voice, self._ledger, self._memory, self._author)
        self._comms = CommJudge()
        self._timers = Timers()
        self.waking = Waking(agent, self._timers, self._voice)
        self._absence = Absence(
            self.waking, self._voice, self._memory, self._ledger, self._comms, partial(self._end, 0)
        )
        self._loss = Loss(self._voice)
        self._bookmark = Bookmark(claim.bookmark_file)
        self._reporter = Reporter(agent, self._timers, self._report)
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._link: KernelLink | None = None
        self._live = False
        self._taken_over = False
        self._mark: Mark | None = None  # where a relay that was killed has left its kernel
        self._session = Seen("", State.STARTING, -1)
        self._quiesce: Quiesce | None = None
        self.farewell = Farewell(agent, self._timers)
        self._listen()

    def run(self, session: Seen, *, taken_over: bool) -> int:
        """Relays until the session is over; the answer is the exit status for Jupyter.

        `taken_over` from an earlier relay: the kernel may still be busy with what that one forwarded.
        """
        if taken_over:
            self._taken_over = True
            self._mark = Succession(self._clients, self._timers).begin(self._bookmark) if self._is_lossless else None
        self.waking.has_notices = self._memory.knows_kernel
        self._agent.start(session.version)
        self._on_seen(session)
        while self.farewell.exit_status is None:
            for ready, _ in self._poller.poll(self._timers.milliseconds()):
                handler = self._handlers.get(ready)
                if handler:
                    handler()
            self._timers.run_due()
            self._reporter.tell()
        self._drain_kernel()
        self._ledger.requests.clear()  # a kernel that died answers nothing: clients see that it is gone
        self._close_link()
        return self.farewell.exit_status

    @property
    def kernel_has_answered(self) -> bool:
        """Whether the kernel has answered at least once."""
        return self._memory.knows_kernel

    def watch_signals(self, signals: socket.socket) -> None:
        """Takes signal numbers, one byte each, from this socket."""
        self._register(signals.fileno(), partial(self._on_signals, signals))

    def watch_parent(self, pidfd: int) -> None:
        """When this process ends nobody wants the kernel any more: the session is put to sleep."""
        self._register(pidfd, partial(self._on_parent_gone, pidfd))

    # What clients send

    def _on_requests(self, channel: str) -> None:
        for frames in receive_available(self._clients.sockets[channel], AT_ONCE):
            message = Message.parse(frames)
            if message is None or not self._signer.trusts(message):
                log.warning("A message on %s was dropped: it is not signed with this kernel's key.", channel)
                continue
            self._ledger.noticed(message, is_use=self._comms.is_activity(message))
            if self._live:
                self._forward(channel, message)
            else:
                self._absence.take(channel, message, at_work=self._sleeps_at_work)

    def _forward(self, channel: str, message: Message) -> None:
        assert self._link is not None
        self._ledger.forwarded(channel, message)
        self._loss.tell(message)
        if message.header.msg_type == "shutdown_request":
            self.farewell.expect()
        self._link.side.send(channel, message.frames)

    def _on_subscription(self) -> None:
        for topic in self._clients.subscriptions():
            self._voice.subscribed(topic)

    # The way to the kernel

    def _on_kernel(self, source: Any) -> None:
        assert self._link is not None
        for channel, frames in self._link.side.collect(source):
            self._homeward.take(self._link, channel, frames)
        self._check_link()

    def _open_link(self) -> None:
        self._close_link()
        side = self._new_side()
        self._link = KernelLink(side, self._author, self._session.lease)
        for source in side.sources:
            self._register(source, partial(self._on_kernel, source))
        if self._taken_over:
            self._link.ask_shell()
            self._taken_over = False
        self._reconnect()
        self._probe()

    def _new_side(self) -> KernelSide | InnerSide:
        if isinstance(self._inner, InnerHalf):
            mark, self._mark = self._mark, None
            return InnerSide(self._inner, self._bookmark, lambda: self._clients.subscribers, mark)
        return KernelSide(self._inner, self._clients.context)

    def _reconnect(self) -> None:
        if self._link and self._session.state in RUNS:
            self._link.side.connect()
            if not self._link.side.is_connected:
                self._timers.set("reconnect", RECONNECT, self._reconnect)

    def _probe(self) -> None:
        if self._link and not self._link.check():
            self._timers.set("probe", self._link.probe(), self._probe)

    def _check_link(self) -> None:
        """Goes on as far as the way to the kernel allows now."""
        link = self._link
        if link is None or self._session.state not in RUNS:
            self._finish_quiesce()
        elif link.side.is_lost:
            self._open_link()
        elif not link.side.is_connected:
            self._live = False
            self._timers.set_if_unset("reconnect", RECONNECT, self._reconnect)
        elif link.proven:
            self._go_live()
        elif link.check():
            self._timers.cancel("probe")
            self._ledger.connected()
            self.waking.has_notices = True
            self._go_live()
        elif link.wants_status:
            self._timers.set_if_unset("soon", AGAIN_AFTER_REPLY, self._probe)

    def _go_live(self) -> None:
        """Forwards from now on, and first what was held."""
        if self._live:
            return
        self._live = True
        self._quiesce = None
        self._agent.answered(self._session.version)
        for held in self.waking.release():
            self._forward(held.channel, held.message)
        if self.waking.is_interrupt_held:
            self.waking.is_interrupt_held = False
            self._agent.signal(signal.SIGINT)

    def _leave_kernel(self) -> None:
        """The kernel's process goes away. With an inner half nothing that is under way is lost."""
        self._live = False
        self._quiesce = None
        if self._link and self._link.side.lossless:
            self._link.side.disconnect()
        else:
            self._close_link()

    def _close_link(self) -> None:
        self._live = False
        self._quiesce = None
        self._timers.cancel("probe")
        if self._link:
            for source in self._link.side.sources:
                self._unregister(source)
            self._link.close()
            self._link = None
        lost = [Held(channel, message, wakes=False) for channel, message in self._ledger.requests.values()]
        self._voice.fail(lost, "SessionInterrupted", self._loss.reason)
        self._ledger.requests.clear()

    # What the agent says

    def _on_mail(self) -> None:
        for event in self._mailbox.drain():
            self._on_event(event)

    def _on_event(self, event: LinkEvent) -> None:
        match event:
            case Seen():
                self.waking.reachable = True
                self._on_seen(event)
            case Progress():
                self.waking.on_progress(event)
            case OperationEnded(kind="resume", error=error):
                self.waking.on_resume_ended(error)
            case OperationEnded():
                self.farewell.on_operation_ended(event)
            case Gone():
                self.farewell.over(None)
            case Unreachable():
                self.waking.reachable = False

    def _on_seen(self, session: Seen) -> None:
        self._session = session
        self.farewell.session = self.waking.session = session
        self._reporter.away = session.state in AWAY
        if session.state in OVER:
            self.farewell.over(session.exit_status)
        elif session.state in RUNS:
            self._loss.seen(session)
            self._quiesce = None
            if self._link is None or (self._link.lease != session.lease and not self._link.side.lossless):
                self._open_link()
            else:
                self._link.lease = session.lease
                self._reconnect()
                self._check_link()
        elif session.state is State.HIBERNATING:
            self._start_quiesce()
        elif session.state in AWAY or session.state is State.RESUMING:
            self._leave_kernel()
            self.waking.consider()

    def _start_quiesce(self) -> None:
        version = self._session.version
        if self._quiesce and self._quiesce.version == version:
            return
        self._live = False
        if self._link is None or not self._link.proven:
            self._agent.quiesced(version, False, "The kernel is still starting.", lossless=self._is_lossless)
            return
        self._quiesce = Quiesce(version, self._link, self._timers, self._finish_quiesce)
        self._finish_quiesce()

    def _finish_quiesce(self) -> None:
        if self._quiesce is None or self._quiesce.told:
            return
        verdict = self._quiesce.verdict(self._ledger, self.waking.held)
        if verdict is None:
            return
        self._memory.save()
        self._quiesce.told = True
        self._agent.quiesced(self._quiesce.version, not verdict, verdict, lossless=self._is_lossless)
        if verdict and not self._is_lossless:
            self._go_live()

    # Signals and the end

    def _on_signals(self, signals: socket.socket) -> None:
        for signum in signals.recv(64):
            if signum == signal.SIGINT:
                self._on_interrupt()
            elif signum == signal.SIGTERM:
                self._end(128 + signal.SIGTERM)
            elif signum == signal.SIGHUP:
                self._on_deserted()

    def _on_interrupt(self) -> None:
        self._claim.mark_interrupted(True)
        self._timers.set("outlived", KILLED_WITHIN, partial(self._claim.mark_interrupted, False))
        if self._live:
            self._agent.signal(signal.SIGINT)
        else:
            self.waking.cancel_cells()
            if self._sleeps_at_work:
                self.waking.hold_interrupt()

    def _on_parent_gone(self, pidfd: int) -> None:
        self._unregister(pidfd)
        os.close(pidfd)
        self._on_deserted()

    def _end(self, exit_status: int) -> None:
        self.waking.given_up = True
        self.farewell.end(exit_status)

    def _on_deserted(self) -> None:
        self.farewell.deserted(lambda: self._live and not self._ledger.in_flight)

    def _drain_kernel(self) -> None:
        """The kernel has exited; what it sent last is still in the sockets."""
        if self._link is None:
            return
        last = zmq.Poller()
        for source in self._link.side.sources:
            last.register(source, zmq.POLLIN)
        while ready := last.poll(50):
            for source, _ in ready:
                self._handlers[source]()

    # Plumbing

    def _report(self) -> Kernel:
        busy = self._link is not None and self._link.is_asking_shell
        return self._ledger.report(len(self.waking.held), busy=busy, lossless=self._is_lossless)

    @property
    def _is_lossless(self) -> bool:
        return isinstance(self._inner, InnerHalf)

    @property
    def _sleeps_at_work(self) -> bool:
        """Whether the kernel, which is away, was saved in the middle of something."""
        return self._is_lossless and bool(self._ledger.in_flight)

    def _listen(self) -> None:
        for channel in REQUEST_CHANNELS:
            self._register(self._clients.sockets[channel], partial(self._on_requests, channel))
        self._register(self._clients.sockets["iopub"], self._on_subscription)
        self._register(self._mailbox.fileno(), self._on_mail)

    def _register(self, source: Any, handler: Callable[[], None]) -> None:
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def _unregister(self, source: Any) -> None:
        self._poller.unregister(source)
        del self._handlers[source]
