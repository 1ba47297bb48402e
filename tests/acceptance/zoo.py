"""A session full of creatures (see `creatures/keeper.py`), taken through what can happen to a session."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.installation import Installation, eventually

KEEPER = Path(__file__).parent / "creatures" / "keeper.py"
Health = dict[str, str]  # of every creature: "", or what is wrong with it


class Zoo:
    """One session; `look` asks for the health of everything in it."""

    def __init__(self, agent: Installation, outside: int, names: tuple[str, ...] = ()) -> None:
        self.agent = agent
        self.folder = agent.home / "zoo"
        self.folder.mkdir()
        (self.folder / "outside").write_text(str(outside))
        self.session = agent.run(sys.executable, str(KEEPER), str(self.folder), *names, name="zoo")
        self._asked = 0

    def look(self, word: str) -> Health:
        answer = self.folder / f"answer-{self._asked}"
        (self.folder / "ask.new").write_text(word)
        (self.folder / "ask.new").rename(self.folder / f"ask-{self._asked}")
        self._asked += 1
        eventually(lambda: answer.exists() or self._over(), bool)
        found: Health = json.loads(answer.read_text())
        return found

    def _over(self) -> bool:
        assert self.agent.client.session("zoo")["state"] == "running", self.agent.output("zoo")
        return False


@contextmanager
def echoing_server() -> Iterator[int]:
    """A server outside of every session that sends back what comes; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def talk(connection: socket.socket) -> None:
        with connection:
            while piece := connection.recv(65536):
                connection.sendall(piece)

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
