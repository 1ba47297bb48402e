"""Sockets: inside the tree, listening, and to the outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

Creature = Generator[None, str, None]
socket.setdefaulttimeout(10)  # what was lost is missed, not waited for
ENDS = "hibernated"  # the word after which connections to the outside are closed


def a_pair_of_unix_sockets_with_contents(folder: Path) -> Creature:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    content = os.urandom(100_000)
    while True:
        ours.sendall(content)
        theirs.sendall(b"back")
        yield
        seen = b""
        while len(seen) < len(content):
            seen += theirs.recv(1 << 20)
        assert seen == content
        assert ours.recv(100) == b"back"


def unix_datagrams(folder: Path) -> Creature:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    packets, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        for word in (b"one", b"two", b"three"):
            ours.send(word)
        packets.send(b"a packet")
        packets.send(b"another")
        yield
        assert [theirs.recv(100) for _ in range(3)] == [b"one", b"two", b"three"]
        assert [others.recv(100) for _ in range(2)] == [b"a packet", b"another"]


def a_child_behind_a_unix_socket(folder: Path) -> Creature:
    """A server and its client in one tree, as Jupyter's ipc transport."""
    path = folder / "server.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    if os.fork() == 0:
        connection, _ = server.accept()
        connection.settimeout(None)
        while True:
            connection.sendall(connection.recv(100).upper())
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    while True:
        word = yield
        client.sendall(word.encode())
        assert client.recv(100).decode() == word.upper()


def a_listening_unix_socket(folder: Path) -> Creature:
    for address in (str(folder / "listening.sock"), f"\0torpor-creature-{os.getpid()}-{folder.name}"):
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen()
        threading.Thread(target=_echo_for_ever, args=(server,), daemon=True).start()
    while True:
        word = yield
        for address in (str(folder / "listening.sock"), f"\0torpor-creature-{os.getpid()}-{folder.name}"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address)
                client.sendall(word.encode())
                assert client.recv(100).decode() == word


def a_listening_tcp_socket(folder: Path) -> Creature:
    server = socket.create_server(("127.0.0.1", 0))
    server6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
    names = [server.getsockname(), server6.getsockname()]
    (folder / "port").write_text(str(names[0][1]))
    for one in (server, server6):
        threading.Thread(target=_echo_for_ever, args=(one,), daemon=True).start()
    while True:
        word = yield
        assert [server.getsockname(), server6.getsockname()] == names
        for name in names:
            with socket.create_connection(name[:2], 10) as client:
                client.sendall(word.encode())
                assert client.recv(100).decode() == word


def a_connection_to_the_outside(folder: Path) -> Creature:
    port = int((folder / "outside").read_text())
    connection = socket.create_connection(("127.0.0.1", port))
    while True:
        word = yield
        if word == ENDS:
            try:
                connection.sendall(b"x")
                assert connection.recv(100) == b"", "a connection to the outside came back"
            except OSError:
                pass
            connection.close()
            connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(word.encode())
        assert connection.recv(100).decode() == word


def udp_sockets(folder: Path) -> Creature:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect(server.getsockname())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 50_000)
    size = client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    while True:
        word = yield
        client.send(word.encode())
        assert server.recv(100).decode() == word
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == size


def a_descriptor_in_flight(folder: Path) -> Creature:
    """Sent over a unix socket and not yet received."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    while True:
        socket.send_fds(ours, [b"take it"], [reading])
        yield
        _, (received,), _, _ = socket.recv_fds(theirs, 100, 1)
        os.write(writing, b"through")
        assert os.read(received, 100) == b"through"
        os.close(received)


def an_http_server_of_a_child(folder: Path) -> Creature:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    port = int(child.stdout.readline().split("port ")[1].split()[0])
    (folder / "page").write_text("hello")
    while True:
        yield
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(b"GET /page HTTP/1.0\r\n\r\n")
            answer = b""
            while piece := client.recv(65536):
                answer += piece
        assert answer.endswith(b"hello")


def _echo_for_ever(server: socket.socket) -> None:
    server.settimeout(None)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(100))
