"""One relay per connection file, and what it leaves behind for the next one.

A relay that was killed leaves its session running or hibernated. The next relay on the same connection file finds it
here and goes on with it, unless the kernel was killed because somebody wanted it restarted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from types import TracebackType

import msgspec

from torpor.errors import SetupError
from torpor.jupyter.connection import private_folder

PATIENCE = 10.0  # seconds for an earlier relay to go
INTERVAL = 0.05


class Predecessor(msgspec.Struct):
    """What an earlier relay left. `interrupted`: it got an interrupt right before it was killed, as Jupyter does
    when a kernel is to be killed and started anew."""

    session: str
    interrupted: bool = False


class Claim:
    """Holds the connection file's private folder while the relay lives. A context manager."""

    def __init__(self, connection_file: Path) -> None:
        self._connection_file = connection_file
        self.folder = private_folder(connection_file)
        self._lock = -1
        self._session = ""

    @property
    def kernel_file(self) -> Path:
        """The inner connection file."""
        return self.folder / "kernel.json"

    @property
    def inner_file(self) -> Path:
        """What relay and inner half know of each other; not there when the kernel has no inner half."""
        return self.folder / "inner"

    @property
    def bookmark_file(self) -> Path:
        """How far the relay has read in what the kernel says."""
        return self.folder / "bookmark"

    @property
    def memory_file(self) -> Path:
        """What the relay answers while the kernel is away."""
        return self.folder / "memory.json"

    def __enter__(self) -> Claim:
        deadline = time.monotonic() + PATIENCE
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise SetupError(f"Another relay serves {self._connection_file}.", hint="One kernel has one relay.")
            time.sleep(INTERVAL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._lock)

    def predecessor(self) -> Predecessor | None:
        """What an earlier relay left; None when it left nothing that can be read."""
        try:
            return msgspec.json.decode(self._note.read_bytes(), type=Predecessor)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def record(self, session: str, *, interrupted: bool = False) -> None:
        """Notes which session this relay serves."""
        self._session = session
        self._note.write_bytes(msgspec.json.encode(Predecessor(session, interrupted)))

    def mark_interrupted(self, interrupted: bool) -> None:
        """Notes that an interrupt has just come, or that the relay has outlived it."""
        self.record(self._session, interrupted=interrupted)

    def remove(self) -> None:
        """The session is over: nothing is left to go on with."""
        shutil.rmtree(self.folder)

    @property
    def _note(self) -> Path:
        return self.folder / "relay.json"

    def _try_lock(self) -> bool:
        self.folder = private_folder(self._connection_file)  # an earlier relay may have removed it on its way out
        path = self.folder / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            still_there = path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))
        except OSError:
            still_there = False
        if not still_there:
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True
