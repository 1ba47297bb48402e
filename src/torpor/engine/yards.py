"""Empty folders that a CRIU leaves in /tmp when it is killed while it assembles a session's mounts (criu/mount.c)."""

from __future__ import annotations

import contextlib
from pathlib import Path

YARDS = ".criu.mntns.*"  # in /tmp, whatever TMPDIR says


def remove_abandoned() -> None:
    """Removes these folders, unless some CRIU on this node is restoring and one of them may be its own.

    They are listed before anybody looks for CRIUs: what is listed belongs to one that is seen, or to none that lives.
    """
    found = list(Path("/tmp").glob(YARDS))
    if found and not _some_criu_restores():
        for yard in found:
            with contextlib.suppress(OSError):  # gone, or not empty
                yard.rmdir()


def _some_criu_restores() -> bool:
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            arguments = command.read_bytes().split(b"\0")
            is_criu = any(argument.rpartition(b"/")[2] == b"criu" for argument in arguments)
            if is_criu and (b"restore" in arguments or b"swrk" in arguments):
                return True
    return False
