"""Empty folders that a CRIU leaves in /tmp when it is killed while it assembles a session's mounts (criu/mount.c)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from torpor.engine import procfs
from torpor.errors import NotFound

YARDS = ".criu.mntns.*"  # in /tmp, whatever TMPDIR says
LOOK_AGAIN = 0.02  # seconds


def remove_abandoned(patience: float = 2) -> None:
    """Removes these folders, unless for `patience` seconds some CRIU restores and one of them may be its own.

    What a killed CRIU had forked ends a moment after it, and looks like a CRIU until then. The folders are listed
    before anybody looks for CRIUs: what is listed belongs to one that is seen, or to none that lives.
    """
    deadline = time.monotonic() + patience
    while found := list(Path("/tmp").glob(YARDS)):
        if not _some_criu_restores():
            for yard in found:
                with contextlib.suppress(OSError):  # gone, or not empty
                    yard.rmdir()
            return
        if time.monotonic() > deadline:
            return
        time.sleep(LOOK_AGAIN)


def _some_criu_restores() -> bool:
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, NotFound):  # the process has ended
            if 0 not in procfs.uids(int(command.parent.name)):
                continue  # anybody may write such a command line
            arguments = command.read_bytes().split(b"\0")
            is_criu = any(argument.rpartition(b"/")[2] == b"criu" for argument in arguments)
            if is_criu and (b"restore" in arguments or b"swrk" in arguments):
                return True
    return False
