"""The two sets of sockets: those that clients connect to, and those that lead to the kernel."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from threading import Thread

import zmq
from zmq.utils.monitor import recv_monitor_message

from torpor.errors import SetupError
from torpor.jupyter.connection import CHANNELS, Connection

REQUEST_CHANNELS = ("shell", "control", "stdin")
CLIENT_BACKLOG = 10_000  # iopub messages kept for a client that does not read; a kernel's own socket keeps 1000
LINGER = 1000  # milliseconds for the last messages to leave, as kernels do
RECONNECT = 20  # milliseconds between attempts to reach a kernel that does not listen yet
BIND_PATIENCE = 10.0  # seconds for an earlier relay on the same ports to go
BIND_INTERVAL = 0.05
AT_ONCE = 64  # messages taken from one socket before the others have their turn

Socket = zmq.Socket[bytes]


class ClientSide:
    """The five channels that clients see, bound for the relay's whole life. Heartbeats have their own thread."""

    def __init__(self, connection: Connection) -> None:
        self.context = zmq.Context()  # one for both sides: one thread less between a request and its reply
        self._heart_context = zmq.Context()
        self.sockets: dict[str, Socket] = {}
        self.subscribers = 0  # subscriptions that there are now
        self._connection = connection
        self._waits = False
        self._expected = 0
        self._unpublished: list[Sequence[bytes | zmq.Frame]] = []
        self._late: list[tuple[str, Sequence[bytes | zmq.Frame]]] = []

    def bind(self) -> bool:
        """Binds all channels; True when ports were chosen here, because the connection file names none.

        Waits for an earlier relay to leave its ports. Raises SetupError when somebody else holds them.
        """
        deadline = time.monotonic() + BIND_PATIENCE
        chosen = False
        for channel in CHANNELS:
            socket = self._socket(channel)
            self.sockets[channel] = socket
            _bind(socket, self._connection.endpoint(channel), deadline)
            if not self._connection.port(channel):
                bound = socket.getsockopt(zmq.LAST_ENDPOINT)
                self._connection.facts[f"{channel}_port"] = int(bytes(bound).strip(b"\0").rpartition(b":")[2])
                chosen = True
        Thread(target=_beat, args=(self.sockets.pop("hb"),), name="heartbeat", daemon=True).start()
        return chosen

    def subscriptions(self) -> list[bytes]:
        """Topics that clients have subscribed to since the last call."""
        topics = []
        for (frame,) in receive_available(self.sockets["iopub"], AT_ONCE):
            said = frame.bytes
            if said[:1] == b"\x01":
                self.subscribers += 1
                topics.append(said[1:])
            elif said[:1] == b"\x00":
                self.subscribers -= 1
        return topics

    def wait_for_clients(self, subscribers: int) -> None:
        """From now on keeps what clients are not there for; they are on their way. `subscribers`: so many listen."""
        self._waits = True
        self._expected = subscribers

    def stop_waiting(self) -> None:
        """Clients that have not come have gone."""
        self._waits = False
        self._expected = 0
        self.send_late()

    @property
    def is_waiting(self) -> bool:
        """Whether clients may be on their way."""
        return self._waits

    def publish(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Sends to all that listen."""
        if self.subscribers < self._expected and len(self._unpublished) < CLIENT_BACKLOG:
            self._unpublished.append(frames)
        else:
            self._publish_late()
            send(self.sockets["iopub"], frames)

    def reply(self, channel: str, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Sends to the client that the first frame names. One that has gone misses it, as with any kernel."""
        try:
            send(self.sockets[channel], frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if self._waits:
                self._late.append((channel, frames))

    def send_late(self) -> None:
        """Sends what clients were not there for, as far as they are there now."""
        if self.subscribers >= self._expected:
            self._publish_late()
        late, self._late = self._late, []
        for channel, frames in late:
            self.reply(channel, frames)

    def _publish_late(self) -> None:
        late, self._unpublished = self._unpublished, []
        for frames in late:
            send(self.sockets["iopub"], frames)

    def close(self) -> None:
        """Closes all channels after the last messages have left."""
        for socket in self.sockets.values():
            socket.close(linger=LINGER)
        self._heart_context.term()
        self.context.term()

    def _socket(self, channel: str) -> Socket:
        context = self._heart_context if channel == "hb" else self.context
        socket = context.socket(zmq.XPUB if channel == "iopub" else zmq.ROUTER)
        if channel == "iopub":
            socket.setsockopt(zmq.XPUB_VERBOSER, 1)
            socket.setsockopt(zmq.SNDHWM, CLIENT_BACKLOG)
        else:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        if self._connection.curve:
            public, secret = self._connection.curve
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.LINGER, LINGER)
        return socket


class KernelSide:
    """Fresh sockets to one life of the kernel's process.

    Shell and stdin share one routing id, because the kernel asks for input on the id that the cell came with. The id
    is new for every life: a kernel that was restored may still hold the old one for a connection that is dead.
    What is under way when the process ends is lost, so it may end at quiet moments only.
    """

    lossless = False
    is_connected = True  # as far as libzmq tells
    is_lost = False
    may_repeat = False

    def __init__(self, connection: Connection, context: zmq.Context[Socket]) -> None:
        identity = uuid.uuid4().hex.encode()
        self.sockets: dict[str, Socket] = {}
        self.stdin_is_connected = False
        for channel in REQUEST_CHANNELS:
            socket = self._socket(connection, context, zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, identity)
            socket.setsockopt(zmq.SNDHWM, 0)
            self.sockets[channel] = socket
        iopub = self._socket(connection, context, zmq.SUB)
        iopub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sockets["iopub"] = iopub
        self.monitor: Socket = self.sockets["stdin"].get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        for channel, socket in self.sockets.items():
            socket.connect(connection.endpoint(channel))

    @property
    def sources(self) -> list[Socket]:
        """What to poll."""
        return [*self.sockets.values(), self.monitor]

    def collect(self, source: object) -> list[tuple[str, list[zmq.Frame]]]:
        """Messages that have come from one source, each with its channel."""
        if source is self.monitor:
            event = recv_monitor_message(self.monitor)
            self.stdin_is_connected |= event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            return []
        channel = next(channel for channel, socket in self.sockets.items() if socket is source)
        return [(channel, frames) for frames in receive_available(self.sockets[channel], AT_ONCE)]

    def send(self, channel: str, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Sends a message, now or as soon as there is a connection."""
        send(self.sockets[channel], frames)

    def connect(self) -> None:
        """Nothing to do: libzmq connects by itself."""

    def disconnect(self) -> None:
        """Nothing to do: these sockets are closed and made anew."""

    def close(self) -> None:
        """Closes the sockets; what they still held is dropped."""
        self.sockets["stdin"].disable_monitor()
        for socket in (self.monitor, *self.sockets.values()):
            socket.close(linger=0)

    def _socket(self, connection: Connection, context: zmq.Context[Socket], kind: int) -> Socket:
        socket: Socket = context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)  # what a kernel publishes is never dropped on its way here
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT)
        socket.setsockopt(zmq.LINGER, 0)
        if connection.curve:
            server, _ = connection.curve
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        return socket


def receive_available(socket: Socket, most: int) -> list[list[zmq.Frame]]:
    """Up to `most` messages that are already here, as frames that share the network's buffers."""
    messages: list[list[zmq.Frame]] = []
    while len(messages) < most:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            break
    return messages


def send(socket: Socket, frames: Sequence[bytes | zmq.Frame]) -> None:
    """Sends without waiting; large frames are not copied."""
    socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


def _bind(socket: Socket, endpoint: str, deadline: float) -> None:
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise SetupError(
                    f"The kernel's address {endpoint} cannot be bound ({error.strerror}).",
                    hint="Another kernel or relay may still run on this connection file.",
                ) from error
            time.sleep(BIND_INTERVAL)
        else:
            return


def _beat(socket: Socket) -> None:
    """Answers heartbeats until the context ends."""
    try:
        zmq.proxy(socket, socket)
    except zmq.ContextTerminated:
        socket.close(linger=0)
