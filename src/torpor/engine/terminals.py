"""A session's terminal and standard input, whose other ends the keeper holds while the session is away.

CRIU treats the terminal as external (its key names the device), and a pipe that is handed in at the restore
under its old inode replaces the one that CRIU would make (criu/tty.c, criu/pipes.c).
"""

from __future__ import annotations

import os
import stat
from typing import Protocol

from torpor.model import InputOutput, Session


class Holder(Protocol):
    """What is needed of the keeper."""

    def hold_terminal(self, session: str, rows: int, columns: int) -> str:
        """Path of the session's terminal; a new one when none is held."""
        ...

    def take_fds(self, session: str) -> dict[str, int]:
        """Copies of what is held, by name: `terminal`, `stdin`."""
        ...


def dump_arguments(session: Session) -> list[str]:
    """CRIU arguments that let a session be dumped whose terminal's master is outside."""
    return ["--external", _terminal_key(session.terminal)] if session.terminal else []


def keys(session: Session, holder: Holder) -> dict[str, str]:
    """CRIU's names for what the keeper holds of a running session, for the checkpoint's record."""
    found = {}
    if session.terminal:
        found["terminal"] = _terminal_key(session.terminal)
    if session.launch.io is InputOutput.STREAMS:
        held = holder.take_fds(session.id)
        if "stdin" in held:
            found["stdin"] = _pipe_key(held["stdin"])
        for descriptor in held.values():
            os.close(descriptor)
    return found


def reattach(session: Session, saved: dict[str, str], holder: Holder) -> tuple[list[str], list[int], str | None]:
    """CRIU arguments, the descriptors they name (to be passed to CRIU, then closed), and the terminal's path.

    A pipe that is not held any more is left to CRIU: the session then reads end-of-file from it.
    """
    arguments: list[str] = []
    descriptors: list[int] = []
    terminal = None
    if "terminal" in saved:
        terminal = holder.hold_terminal(session.id, session.launch.rows, session.launch.columns)
        descriptors.append(os.open(terminal, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        arguments += ["--inherit-fd", f"fd[{descriptors[-1]}]:{saved['terminal']}"]
    if "stdin" in saved:
        for name, descriptor in holder.take_fds(session.id).items():
            if name == "stdin" and _pipe_key(descriptor) == saved["stdin"]:
                descriptors.append(descriptor)
                arguments += ["--inherit-fd", f"fd[{descriptor}]:{saved['stdin']}"]
            else:
                os.close(descriptor)
    return arguments, descriptors, terminal


def _terminal_key(path: str) -> str:
    facts = os.stat(path)
    if not stat.S_ISCHR(facts.st_mode):
        raise FileNotFoundError(f"{path} is not a terminal any more")
    return f"tty[{facts.st_rdev:x}:{facts.st_dev:x}]"


def _pipe_key(descriptor: int) -> str:
    return f"pipe:[{os.fstat(descriptor).st_ino}]"
