"""Callers who want a session: what it takes over from them, and whether they can have one like themselves.

Only what a caller has may a session get. Where that cannot be reproduced, it is not started.
"""

from __future__ import annotations

import os

from torpor.engine import procfs
from torpor.errors import Incompatible, NotFound, NotPermitted
from torpor.model import Caller

# Sessions share these with the node; the others they get anew.
SHARED_NAMESPACES = {"user": "user", "mnt": "mount", "pid": "process", "net": "network", "uts": "host name"}


def facts(pid: int, start_time: int, uid: int, gid: int, groups: tuple[int, ...]) -> Caller:
    """What a session takes over from the process that connected, named by its credentials at that moment.

    Raises Incompatible, with the reason, when that process lives in a container or chroot of its own, or under a
    filter; NotFound and NotPermitted when it is not there any more.
    """
    caller = procfs.caller_facts(pid, uid, gid, groups)
    _require_shared_namespaces(caller)
    if not _same_root(pid):
        raise Incompatible(
            "The caller lives in a changed root folder (chroot), and a session started for it would not.",
            safe="Nothing was started.",
            hint="Run the command outside of it.",
        )
    held = procfs.confinement(pid)
    if held:
        raise Incompatible(
            f"The caller is held back by {' and '.join(held)}, and a session started for it would not be.",
            safe="Nothing was started.",
            hint="Run the command outside of it.",
        )
    _require_same_process(pid, start_time)  # last: what was read above is then of the process that connected
    return caller


def _require_shared_namespaces(caller: Caller) -> None:
    own = procfs.namespaces(os.getpid())
    foreign = [word for name, word in SHARED_NAMESPACES.items() if caller.namespaces.get(name) != own.get(name)]
    if foreign:
        raise Incompatible(
            f"The caller lives in another {' and '.join(foreign)} namespace than Torpor's agent, and a session "
            "started for it would not.",
            safe="Nothing was started.",
            hint="Start the agent inside the same container, or run the command outside of it.",
        )


def _same_root(pid: int) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))
    except OSError:
        return False  # it ended meanwhile: nobody to start anything for


def _require_same_process(pid: int, start_time: int) -> None:
    now = procfs.start_time(pid)
    if not start_time or now is None:
        raise NotFound(f"Process {pid}, which asked, has ended.", hint="Run the command again.")
    if now != start_time:
        raise NotPermitted(f"Process {pid} is not the one that connected.", hint="Run the command again.")
