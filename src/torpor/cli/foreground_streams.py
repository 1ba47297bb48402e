"""A session in the foreground without a terminal: standard input into its pipe, its two logs to our two outputs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from torpor.cli.foreground import End, Signals, attach
from torpor.client import Client
from torpor.errors import TorporError

PIECE = 1 << 16
SHORTEST_PAUSE = 0.005  # seconds between looks at the logs while something comes
LONGEST_PAUSE = 0.05
READER_GONE = 141  # 128 + SIGPIPE, as a shell would see it


def stay(client: Client, session: dict[str, Any]) -> int:
    """Stays with the session until it has ended; gives its exit status."""
    signals = Signals()
    folder = Path(session["folder"])
    logs = [(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC), out) for name, out in (("out.log", 1), ("err.log", 2))]
    threading.Thread(target=_feed, args=(client, session["id"]), daemon=True).start()
    end = End(client, session)
    pause = SHORTEST_PAUSE
    try:
        while True:
            status = end.status()
            signals.pass_on(client, session["id"])
            if _pass_on(logs):
                pause = SHORTEST_PAUSE
            elif status is not None:
                return status
            else:
                end.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
    except BrokenPipeError:
        client.signal(session["id"], signal.SIGTERM)
        return READER_GONE
    finally:
        signals.restore()


def _pass_on(logs: list[tuple[int, int]]) -> bool:
    """Copies what has been added to the logs; whether there was anything."""
    any_news = False
    for log, output in logs:
        while piece := os.read(log, PIECE):
            any_news = True
            view = memoryview(piece)
            while view:
                view = view[os.write(output, view) :]
    return any_news


def _feed(client: Client, session_id: str) -> None:
    """Copies standard input into the session's pipe until either end is closed."""
    try:
        connection, _, _, (pipe,) = attach(client, {"session": session_id, "want": "stdin"})
    except (OSError, TorporError, ValueError):
        return  # the session is over already
    connection.close()
    try:
        while piece := os.read(0, PIECE):
            view = memoryview(piece)
            while view:
                view = view[os.write(pipe, view) :]
    except OSError:
        return  # our input is not readable, or nobody reads on the other side
    finally:
        os.close(pipe)
