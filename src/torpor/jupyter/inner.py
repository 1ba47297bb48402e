"""The inner half of the relay: the kernel's parent inside its session, saved with it and with all that is under way.

It passes bytes between the kernel's `ipc` sockets - both ends of them are inside the session, so CRIU saves them with
their contents - and the relay outside. Whatever the relay has not confirmed stays in this process.

Started with `python3 -I -S` and with nothing but the standard library: it is saved in every checkpoint, so it stays
small. Arguments: SETTINGS -- COMMAND. The settings are lines: address, port, secret (hexadecimal), path prefix of the
kernel's sockets, and one number for each channel. The exit status is the command's; 128 + signal when it was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque

from torpor.jupyter.line import ANSWER, AT_MOST, AT_ONCE, HELLO, MAC, NONCE, VERDICT, Line, is_proof, proof

CHANNELS = ("shell", "control", "stdin", "iopub")  # in the order of their numbers on the line
LIMIT = 256 << 20  # bytes kept for the relay; beyond it the kernel waits, or drops output, as with any client
RETRY = 0.02  # seconds between attempts to reach a kernel that does not listen yet
FAREWELL = 5.0  # seconds for the relay to fetch what a kernel said last
EARLIER_READS = 64  # reads that empty a connection whose relay was killed
PENDING = 8  # connections that may be in the middle of the handshake
FORWARDED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
}
NOT_FOUND, NOT_EXECUTABLE = 127, 126
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # of this process alone: a large output leaves nothing behind


class Channel:
    """One of the kernel's sockets; what is for it is kept while it does not take it."""

    def __init__(self, number: int, prefix: str, name: str) -> None:
        self.number = number
        self.paths = (
            f"{prefix}-{name}",
            f"{prefix}:{name}",
        )  # as Jupyter has it, and as kernels that make no difference
        self.socket: socket.socket | None = None
        self.size = AT_ONCE
        self.is_over = False  # the kernel has closed it
        self._leaving: deque[memoryview] = deque()

    @property
    def is_stuck(self) -> bool:
        """Whether the kernel has not taken everything."""
        return bool(self._leaving)

    def connect(self) -> bool:
        """Whether the kernel listens there."""
        for path in self.paths:
            attempt = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                attempt.connect(path)
            except OSError:
                attempt.close()
            else:
                self.socket = attempt
                return True
        return False

    def add(self, data: bytes) -> None:
        """Takes bytes for the kernel."""
        if not self.is_over:
            self._leaving.append(memoryview(data))

    def flush(self) -> None:
        """Sends what the kernel takes now."""
        while self._leaving and self.socket is not None:
            try:
                written = self.socket.send(self._leaving[0])
            except BlockingIOError:
                return
            except OSError:
                self._leaving.clear()  # nobody reads it any more
                return
            if written == len(self._leaving[0]):
                self._leaving.popleft()
            else:
                self._leaving[0] = self._leaving[0][written:]

    def receive(self) -> bytes:
        """What the kernel sent; nothing when there is nothing yet, or never again."""
        assert self.socket is not None
        try:
            data = self.socket.recv(self.size)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.is_over = not data
        self.size = AT_MOST if len(data) == self.size else AT_ONCE
        return data

    def close(self) -> None:
        """Leaves the kernel."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class Handshake:
    """A connection whose other side has not shown yet that it is the relay."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = os.urandom(NONCE)
        self.answer = b""
        connection.send(HELLO + self.nonce)


class Inner:
    """Serves one kernel to its end."""

    def __init__(self, settings: list[str]) -> None:
        address, port, secret, prefix, *numbers = settings
        self._secret = bytes.fromhex(secret)
        self._folder = os.path.dirname(prefix)
        self._prefix = prefix
        self._names = numbers[: len(CHANNELS)]
        self._channels: list[Channel] = []
        self._line = Line()
        self._stream = b""
        self._handshakes: dict[int, Handshake] = {}
        self._deadline: float | None = None  # until then the relay may fetch what the kernel said last
        self._asked = False
        self._status = 0
        self._watched: dict[int, int] = {}
        self._poll = select.epoll()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((address, int(port)))
        self._listener.listen(PENDING)
        self._listener.setblocking(False)
        os.mkdir(self._folder, 0o700)
        self._signals = _signal_pipe()
        self._watch(self._listener.fileno(), select.EPOLLIN)
        self._watch(self._signals, select.EPOLLIN)

    def serve(self, argv: list[str]) -> int:
        """Runs the kernel and passes everything on; the answer is its exit status."""
        self._kernel = _start(argv)
        while not self._is_done():
            ready = self._poll.poll(self._timeout())
            descriptors = {descriptor for descriptor, _ in ready}
            if self._line.connection is not None and self._line.connection.fileno() in descriptors:
                self._on_relay()
            for channel in self._channels:
                if channel.socket is not None and channel.socket.fileno() in descriptors:
                    self._on_kernel(channel)
            for descriptor in descriptors & self._handshakes.keys():
                self._on_handshake(descriptor)
            if self._listener.fileno() in descriptors:
                self._on_connection()
            if self._signals in descriptors:
                self._on_signals()
            self._go_on()
        for name in os.listdir(self._folder):
            os.unlink(f"{self._folder}/{name}")
        os.rmdir(self._folder)
        return self._status

    def _on_relay(self) -> None:
        try:
            for number, data in self._line.receive():
                if number < len(self._channels):
                    self._channels[number].add(data)
                    self._channels[number].flush()
        except OSError:
            self._lose_relay()

    def _hear_out_relay(self) -> None:
        """Takes what an earlier relay sent before it was killed."""
        for _ in range(EARLIER_READS):
            if self._line.connection is not None:
                self._on_relay()

    def _on_kernel(self, channel: Channel) -> None:
        channel.flush()
        if self._line.kept < LIMIT and (data := channel.receive()):
            self._line.add(channel.number, data)
        if channel.is_over:
            self._leave(channel)

    def _go_on(self) -> None:
        """Sends what can be sent, and says to epoll what is waited for."""
        self._flush_line()
        for channel in self._channels:
            if channel.socket is None and not channel.is_over and channel.connect():
                channel.flush()
            if channel.socket is not None:
                wanted = select.EPOLLIN if self._line.kept < LIMIT else 0
                self._watch(channel.socket.fileno(), wanted | (select.EPOLLOUT if channel.is_stuck else 0))

    def _flush_line(self) -> None:
        try:
            self._line.flush()
        except OSError:
            self._lose_relay()
        if self._line.connection is not None:
            waits = select.EPOLLOUT if self._line.is_stuck else 0
            self._watch(self._line.connection.fileno(), select.EPOLLIN | waits)

    def _timeout(self) -> float | None:
        if self._deadline is not None:
            return max(self._deadline - time.monotonic(), 0.0)
        starting = any(channel.socket is None and not channel.is_over for channel in self._channels)
        return RETRY if starting else None

    # The relay comes

    def _on_connection(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._handshakes) >= PENDING:
                self._drop(next(iter(self._handshakes)))
            self._handshakes[connection.fileno()] = Handshake(connection)
            self._watch(connection.fileno(), select.EPOLLIN)

    def _on_handshake(self, descriptor: int) -> None:
        handshake = self._handshakes[descriptor]
        try:
            piece = handshake.connection.recv(ANSWER.size - len(handshake.answer))
        except OSError:
            piece = b""
        handshake.answer += piece
        if not piece:
            self._drop(descriptor)
        elif len(handshake.answer) == ANSWER.size:
            self._on_answer(descriptor, handshake)

    def _on_answer(self, descriptor: int, handshake: Handshake) -> None:
        nonce, stream, is_new, settled, heard, shown = ANSWER.unpack(handshake.answer)
        if not is_proof(shown, self._secret, b"relay", handshake.nonce, handshake.answer[:-MAC]):
            self._drop(descriptor)
            return
        self._hear_out_relay()
        self._lose_relay()
        if is_new:
            self._start_anew(stream)
        goes_on = stream == self._stream and self._line.can_go_on(settled, heard)
        said = VERDICT.pack(goes_on, self._line.heard, b"")[:-MAC]
        try:
            handshake.connection.send(said + proof(self._secret, b"inner", nonce, said))
        except OSError:
            goes_on = False
        if goes_on:
            del self._handshakes[descriptor]
            self._line.attach(handshake.connection, settled, heard)
        else:
            self._drop(descriptor)

    def _start_anew(self, stream: bytes) -> None:
        for channel in self._channels:
            self._leave(channel)
        self._stream = stream
        self._line = Line()
        self._channels = [Channel(number, self._prefix, name) for number, name in enumerate(self._names)]

    def _lose_relay(self) -> None:
        if self._line.connection is not None:
            self._unwatch(self._line.connection.fileno())
            self._line.detach()

    def _drop(self, descriptor: int) -> None:
        self._unwatch(descriptor)
        self._handshakes.pop(descriptor).connection.close()

    # The kernel goes

    def _on_signals(self) -> None:
        for number in os.read(self._signals, 64):
            if number == signal.SIGCHLD:
                self._reap()
            elif self._deadline is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._kernel, number)

    def _reap(self) -> None:
        pid, status = os.waitpid(self._kernel, os.WNOHANG) if self._deadline is None else (0, 0)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            self._status = code if code >= 0 else 128 - code
            self._deadline = time.monotonic() + FAREWELL
            for channel in self._channels:
                self._drain(channel)

    def _drain(self, channel: Channel) -> None:
        while channel.socket is not None and (data := channel.receive()):
            self._line.add(channel.number, data)
        self._leave(channel)
        channel.is_over = True

    def _is_done(self) -> bool:
        if self._deadline is None:
            return False
        if self._line.connection is not None and not self._line.is_stuck and not self._asked:
            self._asked = True
            self._line.ask()
            self._flush_line()
        all_said = not self._stream or self._line.confirmed == self._line.count
        return all_said or time.monotonic() > self._deadline

    # Plumbing

    def _leave(self, channel: Channel) -> None:
        if channel.socket is not None:
            self._unwatch(channel.socket.fileno())
            channel.close()

    def _watch(self, descriptor: int, events: int) -> None:
        before = self._watched.get(descriptor)
        if before is None:
            self._poll.register(descriptor, events)
        elif before != events:
            self._poll.modify(descriptor, events)
        self._watched[descriptor] = events

    def _unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)


def main() -> None:
    """Runs the command of this process's arguments and ends with its status."""
    with open("/proc/self/comm", "w") as name:
        name.write("torpor-inner")
    with open(sys.argv[1]) as file:
        settings = file.read().split("\n")
    inner = Inner(settings)
    os._exit(inner.serve(sys.argv[3:]))


def _signal_pipe() -> int:
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (*FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _start(argv: list[str]) -> int:
    """Starts the kernel, leader of a process group of its own, as without Torpor."""
    kernel = os.fork()
    if kernel == 0:
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)  # Python ignores some itself
            for name in [name for name, value in ENVIRONMENT.items() if os.environ.get(name) == value]:
                del os.environ[name]
            os.execvp(argv[0], argv)
        except OSError as failure:
            os.write(2, f"torpor: {argv[0]}: {failure.strerror}\n".encode())
            os._exit(NOT_FOUND if isinstance(failure, FileNotFoundError) else NOT_EXECUTABLE)
        finally:
            os._exit(NOT_EXECUTABLE)
    with contextlib.suppress(OSError):  # it may have done this itself and called exec, or have ended
        os.setpgid(kernel, kernel)
    os.chdir("/")
    return kernel
