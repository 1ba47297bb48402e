"""Who asks for a session, and whether what they live in can be reproduced for it."""

from __future__ import annotations

import os

from torpor.engine import procfs
from torpor.errors import Incompatible
from torpor.model import Caller

# Sessions share these with the node; the others they get anew.
SHARED_NAMESPACES = {"user": "user", "mnt": "mount", "pid": "process", "net": "network"}


def facts(pid: int, uid: int, gid: int) -> Caller:
    """What a session takes over from the process that connected.

    Raises Incompatible, with the reason, when that process lives in a container or chroot of its own; NotFound and
    NotPermitted when it is not there any more.
    """
    caller = procfs.caller_facts(pid, uid, gid)
    own = procfs.namespaces(os.getpid())
    foreign = [word for name, word in SHARED_NAMESPACES.items() if caller.namespaces.get(name) != own.get(name)]
    if foreign:
        raise Incompatible(
            f"The caller lives in another {' and '.join(foreign)} namespace than Torpor's agent, and a session "
            "started for it would not.",
            safe="Nothing was started.",
            hint="Start the agent inside the same container, or run the command outside of it.",
        )
    if not _same_root(pid):
        raise Incompatible(
            "The caller lives in a changed root folder (chroot), and a session started for it would not.",
            safe="Nothing was started.",
            hint="Run the command outside of it.",
        )
    return caller


def _same_root(pid: int) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))
    except OSError:
        return False  # it ended meanwhile: nobody to start anything for
