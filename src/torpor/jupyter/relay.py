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

from torpor.jupyter.agent_link import AgentLink, Gone, LinkEvent, Mailbox, OperationEnded, Progress, Seen, Unreachable
from torpor.jupyter.claim import Claim
from torpor.jupyter.connection import Connection
from torpor.jupyter.farewell import Farewell
from torpor.jupyter.held import Held
from torpor.jupyter.kernel_link import AGAIN_AFTER_REPLY, KernelLink
from torpor.jupyter.ledger import Ledger
from torpor.jupyter.memory import Memory
from torpor.jupyter.policy import CommJudge, Effect, effect
from torpor.jupyter.quiesce import Quiesce
from torpor.jupyter.reporter import Reporter
from torpor.jupyter.sockets import REQUEST_CHANNELS, ClientSide, receive_available, send
from torpor.jupyter.timers import Timers
from torpor.jupyter.voice import Voice
from torpor.jupyter.waking import AWAY, Waking
from torpor.jupyter.wire import Author, Message, Signer
from torpor.model import Kernel, State

AT_ONCE = 64  # messages taken from one socket before the others have their turn
KILLED_WITHIN = 2.0  # seconds after an interrupt within which Jupyter kills a kernel that it wants anew
OVER = frozenset({State.ENDED, State.FAILED})
log = logging.getLogger(__name__)


class Relay:
    """Serves one session until it is over. `inner` leads to the kernel, `clients` is already bound."""

    def __init__(
        self,
        clients: ClientSide,
        outer: Connection,
        inner: Connection,
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
        self._comms = CommJudge()
        self._timers = Timers()
        self._waking = Waking(agent, self._timers, self._voice)
        self._reporter = Reporter(agent, self._timers, self._report)
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._link: KernelLink | None = None
        self._live = False
        self._taken_over = False
        self._session = Seen("", State.STARTING, -1)
        self._quiesce: Quiesce | None = None
        self._farewell = Farewell(agent, self._timers)
        self._listen()

    def run(self, session: Seen, *, taken_over: bool) -> int:
        """Relays until the session is over; the answer is the exit status for Jupyter.

        `taken_over` from an earlier relay: the kernel may still be busy with what that one forwarded.
        """
        self._taken_over = taken_over
        self._waking.has_notices = self._memory.knows_kernel
        self._agent.start(session.version)
        self._on_seen(session)
        while self._farewell.exit_status is None:
            for ready, _ in self._poller.poll(self._timers.milliseconds()):
                handler = self._handlers.get(ready)
                if handler:
                    handler()
            self._timers.run_due()
            self._reporter.tell()
        self._drain_kernel()
        self._close_link()
        return self._farewell.exit_status

    @property
    def was_told_to_end(self) -> bool:
        """Whether Jupyter ended this kernel, by a message or a signal."""
        return self._farewell.started

    @property
    def session_is_kept(self) -> bool:
        """Whether the session lives on after this relay."""
        return self._farewell.kept

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
                self._while_away(channel, message)

    def _forward(self, channel: str, message: Message) -> None:
        assert self._link is not None
        self._ledger.forwarded(channel, message)
        if message.header.msg_type == "shutdown_request":
            self._farewell.expect()
        send(self._link.side.sockets[channel], message.frames)

    def _while_away(self, channel: str, message: Message) -> None:
        match effect(message, self._comms):
            case Effect.SHUTDOWN:
                self._voice.shutdown(channel, message)
                self._end(0)
            case Effect.INTERRUPT:
                self._voice.reply(channel, message, "interrupt_reply", {"status": "ok"})
                self._waking.cancel_cells()
            case Effect.ANSWER if answer := self._memory.answer(message):
                self._voice.reply(channel, message, *answer)
                self._ledger.replied(message.header.msg_id)
                self._voice.state("busy" if self._waking.held.first_visible_cell() else "idle")
            case what:
                self._waking.hold(channel, message, wakes=what is Effect.WAKE)

    def _on_subscription(self) -> None:
        for frames in receive_available(self._clients.sockets["iopub"], AT_ONCE):
            if frames[0].bytes[:1] == b"\x01":
                self._voice.subscribed(frames[0].bytes[1:])

    # What the kernel sends

    def _on_replies(self, channel: str) -> None:
        link = self._link
        assert link is not None
        for frames in receive_available(link.side.sockets[channel], AT_ONCE):
            message = Message.parse(frames)
            if message is None:
                continue
            if link.is_own(message.parent):
                if self._signer.trusts(message):
                    self._memory.learn(message, all_comms=True)
                    link.answered(message)
                continue
            asked = None
            if channel == "stdin":
                self._ledger.asked_for_input(message.parent.msg_id)
            else:
                asked = self._ledger.replied(message.parent.msg_id)
            self._pass_reply(channel, message, asked)
        self._check_proof()

    def _pass_reply(self, channel: str, reply: Message, asked: Message | None) -> None:
        identities = reply.frames[: reply.delimiter] or (asked.identities if asked else [])
        frames = reply.frames[reply.delimiter :]
        if reply.header.msg_type in ("kernel_info_reply", "debug_reply", "usage_reply") and self._signer.trusts(reply):
            self._memory.learn(reply)
        elif reply.header.msg_type == "connect_reply":
            frames = self._author.rewrite(reply, self._memory.ports())  # type: ignore[assignment]
        send(self._clients.sockets[channel], [*identities, *frames])

    def _on_published(self) -> None:
        link = self._link
        assert link is not None
        for frames in receive_available(link.side.sockets["iopub"], AT_ONCE):
            link.heard_iopub()
            message = Message.parse(frames)
            if message is not None:
                if message.header.msg_type == "iopub_welcome":
                    self._voice.kernel_welcomes()
                    continue
                if link.is_own(message.parent):
                    continue
                if message.header.msg_type == "status" and self._signer.trusts(message):
                    self._ledger.published(message.parent.msg_id, str(message.content.get("execution_state")))
            send(self._clients.sockets["iopub"], frames)
        self._check_proof()

    # The way to the kernel

    def _open_link(self) -> None:
        self._close_link()
        self._link = KernelLink(self._inner, self._clients.context, self._author, self._session.lease)
        for channel in REQUEST_CHANNELS:
            self._register(self._link.side.sockets[channel], partial(self._on_replies, channel))
        self._register(self._link.side.sockets["iopub"], self._on_published)
        self._register(self._link.side.monitor, self._on_monitor)
        if self._taken_over:
            self._link.ask_shell()
            self._taken_over = False
        self._probe()

    def _on_monitor(self) -> None:
        if self._link:
            self._link.heard_stdin_monitor()
            self._check_proof()

    def _probe(self) -> None:
        if self._link and not self._link.check():
            self._timers.set("probe", self._link.probe(), self._probe)

    def _check_proof(self) -> None:
        link = self._link
        if link is None or self._live or link.proven:
            self._finish_quiesce()
        elif link.check():
            self._timers.cancel("probe")
            self._ledger.connected()
            self._waking.has_notices = True
            self._agent.answered(self._session.version)
            self._go_live()
        elif link.wants_status:
            self._timers.set_if_unset("soon", AGAIN_AFTER_REPLY, self._probe)

    def _go_live(self) -> None:
        self._live = True
        self._quiesce = None
        for held in self._waking.release():
            self._forward(held.channel, held.message)

    def _close_link(self) -> None:
        self._live = False
        self._quiesce = None
        self._timers.cancel("probe")
        if self._link:
            for socket in (*self._link.side.sockets.values(), self._link.side.monitor):
                self._unregister(socket)
            self._link.close()
            self._link = None
        lost = [Held(channel, message, wakes=False) for channel, message in self._ledger.requests.values()]
        self._voice.fail(lost, "SessionInterrupted", "The session was taken away while this request was under way.")
        self._ledger.requests.clear()

    # What the agent says

    def _on_mail(self) -> None:
        for event in self._mailbox.drain():
            self._on_event(event)

    def _on_event(self, event: LinkEvent) -> None:
        match event:
            case Seen():
                self._waking.reachable = True
                self._on_seen(event)
            case Progress():
                self._waking.on_progress(event)
            case OperationEnded(kind="resume", error=error):
                self._waking.on_resume_ended(error)
            case OperationEnded():
                self._farewell.on_operation_ended(event)
            case Gone():
                self._farewell.over(None)
            case Unreachable():
                self._waking.reachable = False

    def _on_seen(self, session: Seen) -> None:
        self._session = session
        self._farewell.session = self._waking.session = session
        self._reporter.away = session.state in AWAY
        if session.state in OVER:
            self._farewell.over(session.exit_status)
        elif session.state in (State.RUNNING, State.CHECKPOINTING):
            if self._link is None or self._link.lease != session.lease:
                self._open_link()
            elif self._link.proven and not self._live:
                self._go_live()
        elif session.state is State.HIBERNATING:
            self._start_quiesce()
        elif session.state in AWAY or session.state is State.RESUMING:
            self._close_link()
            self._waking.consider()

    def _start_quiesce(self) -> None:
        version = self._session.version
        if self._quiesce and self._quiesce.version == version:
            return
        if self._link is None or not self._link.proven:
            self._agent.quiesced(version, False, "The kernel is still starting.")
            return
        self._live = False
        self._quiesce = Quiesce(version, self._link, self._timers, self._finish_quiesce)
        self._finish_quiesce()

    def _finish_quiesce(self) -> None:
        if self._quiesce is None or self._quiesce.told:
            return
        verdict = self._quiesce.verdict(self._ledger, self._waking.held)
        if verdict is None:
            return
        if not verdict:
            self._memory.save()
        self._quiesce.told = True
        self._agent.quiesced(self._quiesce.version, not verdict, verdict)
        if verdict:
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
            self._waking.cancel_cells()

    def _on_parent_gone(self, pidfd: int) -> None:
        self._unregister(pidfd)
        os.close(pidfd)
        self._on_deserted()

    def _end(self, exit_status: int) -> None:
        self._waking.given_up = True
        self._farewell.end(exit_status)

    def _on_deserted(self) -> None:
        self._farewell.deserted(lambda: self._live and not self._ledger.in_flight)

    def _drain_kernel(self) -> None:
        """The kernel has exited; what it sent last is still in the sockets."""
        if self._link is None:
            return
        last = zmq.Poller()
        for channel in self._link.side.sockets.values():
            last.register(channel, zmq.POLLIN)
        while ready := last.poll(50):
            for channel, _ in ready:
                self._handlers[channel]()

    # Plumbing

    def _report(self) -> Kernel:
        busy = self._link is not None and self._link.is_asking_shell
        return self._ledger.report(len(self._waking.held), busy=busy)

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
