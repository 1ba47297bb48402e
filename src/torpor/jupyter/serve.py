"""`torpor kernel`: starts the kernel as a session, or finds the session of a relay that was killed, and relays."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from torpor.client import Client
from torpor.errors import NotFound, TorporError, UsageError
from torpor.jupyter.agent_link import AgentLink, AgentSession, Mailbox, Seen, SessionControl
from torpor.jupyter.claim import Claim
from torpor.jupyter.command import with_inner_half
from torpor.jupyter.connection import Connection, InnerHalf
from torpor.jupyter.inner import ENVIRONMENT, NOT_EXECUTABLE, NOT_FOUND
from torpor.jupyter.relay import OVER, Relay
from torpor.jupyter.sockets import ClientSide

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PLACEHOLDER = "{connection_file}"
LOG_TAIL = 4000  # bytes of a dead kernel's output that are shown
AUTO, TCP = "auto", "tcp"
NOT_WITH_IPC = (
    "This kernel ended before it answered over Jupyter's ipc transport. It is started again with tcp, which means that "
    'it is saved at quiet moments only. Its kernelspec can say so: "metadata": {"torpor": {"transport": "tcp"}}'
)
log = logging.getLogger(__name__)


class Sessions:
    """How the relay comes to its session: the agent starts it, or still has it."""

    def __init__(self, client: Client, *, name: str | None = None, idle_after: float | None = None) -> None:
        self._client = client
        self._name = name
        self._idle_after = idle_after

    def start(self, argv: list[str], labels: dict[str, str], further: Mapping[str, str]) -> tuple[Seen, SessionControl]:
        """Starts the kernel as this user, here, with this environment and `further` variables that it lacks."""
        facts = self._client.create_session(
            argv,
            cwd=os.getcwd(),
            env={**further, **{name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}},
            name=self._name,
            labels=labels,
            idle_after=self._idle_after,
            kind="kernel",
        )
        session = msgspec.convert(facts, Seen)
        return session, AgentSession(self._client, session.id)

    def find(self, session: str) -> tuple[Seen, SessionControl] | None:
        """The session, when there is still one that can go on."""
        try:
            seen = msgspec.convert(self._client.session(session), Seen)
        except NotFound:
            return None
        return None if seen.state in OVER else (seen, AgentSession(self._client, session))

    def end(self, session: str) -> None:
        """Ends a session that nobody wants any more; its checkpoints are kept."""
        self._client.end(session, keep=True)

    def remove(self, session: str) -> None:
        """Forgets a session that is over and has saved nothing."""
        self._client.remove(session)

    def last_words(self, session: str) -> bytes:
        """The end of what the kernel printed on its own streams."""
        tail = b""
        for piece in self._client.logs(session):
            tail = (tail + piece)[-LOG_TAIL:]
        return tail


def serve_kernel(connection_file: Path, argv: Sequence[str], sessions: Sessions, *, transport: str = AUTO) -> int:
    """Is the kernel of this connection file until its session is over; the answer is the exit status.

    `argv` starts the real kernel; `{connection_file}` or the file's own path in it becomes the inner connection file's.
    `transport`: with "ipc" the kernel gets an inner half, so that it may be saved in the middle of anything; with "tcp"
    it is saved at quiet moments only; "auto" is ipc, and then tcp if the kernel ends before it has ever answered.
    Raises UsageError for a bad connection file or command, AgentUnreachable when no agent answers.
    """
    signals = _catch_signals()
    outer = Connection.read(connection_file)
    with Claim(connection_file.absolute()) as claim:
        command = _with_inner_file(argv, connection_file, claim.kernel_file)
        clients = ClientSide(outer)
        try:
            if clients.bind():
                outer.write(connection_file)
            relay: Relay | None = None
            while True:
                session, control, inner, taken_over = _session(
                    claim, outer, command, sessions, connection_file, lossless=transport != TCP
                )
                relay = _relay(clients, outer, inner, control, claim, relay)
                relay.watch_signals(signals)
                _watch_parent(relay)
                exit_status = relay.run(session, taken_over=taken_over)
                if transport != AUTO or isinstance(inner, Connection) or not _may_know_tcp_only(relay, exit_status):
                    break
                log.warning(NOT_WITH_IPC)
                sessions.remove(session.id)
                transport = TCP
            if exit_status and not relay.farewell.started:
                _show_last_words(sessions, session.id)
            if not relay.farewell.kept:
                claim.remove()
        finally:
            clients.close()
    return exit_status


def _relay(
    clients: ClientSide,
    outer: Connection,
    inner: Connection | InnerHalf,
    control: SessionControl,
    claim: Claim,
    earlier: Relay | None,
) -> Relay:
    mailbox = Mailbox()
    relay = Relay(clients, outer, inner, AgentLink(control, mailbox), mailbox, claim)
    if earlier:
        relay.waking.held = earlier.waking.held
    return relay


def _may_know_tcp_only(relay: Relay, exit_status: int) -> bool:
    """Whether a kernel that ended may run with another transport: it was there, and nobody has heard of it."""
    was_there = exit_status not in (NOT_FOUND, NOT_EXECUTABLE)
    return was_there and not relay.kernel_has_answered and not relay.farewell.started and not relay.farewell.kept


def _session(
    claim: Claim, outer: Connection, command: list[str], sessions: Sessions, connection_file: Path, *, lossless: bool
) -> tuple[Seen, SessionControl, Connection | InnerHalf, bool]:
    predecessor = claim.predecessor()
    found = sessions.find(predecessor.session) if predecessor else None
    if predecessor and found and not predecessor.interrupted:
        claim.record(predecessor.session)
        return *found, _inner_of(claim), True
    if predecessor and found:
        sessions.end(predecessor.session)
    claim.inner_file.unlink(missing_ok=True)
    further: Mapping[str, str] = {}
    if lossless:
        further = ENVIRONMENT
        half = InnerHalf.choose()
        half.write(claim.inner_file)
        outer.inside(half).write(claim.kernel_file)
        command = with_inner_half(command, claim.inner_file)
    else:
        outer.inner().write(claim.kernel_file)
    session, control = sessions.start(command, _labels(connection_file), further)
    claim.record(session.id)
    return session, control, _inner_of(claim), False


def _inner_of(claim: Claim) -> Connection | InnerHalf:
    if claim.inner_file.exists():
        return InnerHalf.read(claim.inner_file)
    return Connection.read(claim.kernel_file)


def _with_inner_file(argv: Sequence[str], connection_file: Path, inner: Path) -> list[str]:
    names = {PLACEHOLDER, str(connection_file), str(connection_file.absolute()), os.path.realpath(connection_file)}
    command = list(argv)
    for name in sorted(names, key=len, reverse=True):
        command = [argument.replace(name, str(inner)) for argument in command]
    if not argv or command == list(argv):
        raise UsageError(
            f"The kernel's command does not name the connection file {connection_file}.",
            hint=f"Give the command as the kernelspec does, with {PLACEHOLDER} in it.",
        )
    return command


def _labels(connection_file: Path) -> dict[str, str]:
    labels = {"jupyter.connection_file": str(connection_file)}
    notebook = os.environ.get("JPY_SESSION_NAME")
    return {**labels, "jupyter.notebook": notebook} if notebook else labels


def _catch_signals() -> socket.socket:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    for signum in SIGNALS:
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    return reader


def _watch_parent(relay: Relay) -> None:
    parent = os.environ.get("JPY_PARENT_PID", "")
    if not parent.isdigit() or int(parent) <= 1:
        return
    try:
        relay.watch_parent(os.pidfd_open(int(parent)))
    except ProcessLookupError:
        log.warning("Process %s, which started this kernel, has already gone.", parent)


def _show_last_words(sessions: Sessions, session: str) -> None:
    try:
        words = sessions.last_words(session)
    except TorporError as error:
        log.info("%s", error)
        return
    sys.stderr.write(words.decode(errors="replace"))
