"""Dumping another user's session where root lacks a capability.

CRIU reads the limits of every process with prlimit, which for processes of another uid needs CAP_SYS_RESOURCE. Root
has it on ordinary machines; in some containers and sandboxes it does not. There, CRIU runs under the session's own
uid with all the other capabilities kept as ambient ones.
"""

from __future__ import annotations

import os
from pathlib import Path

CAP_SYS_RESOURCE = 24


def may_read_limits_of_others() -> bool:
    """Whether this process has CAP_SYS_RESOURCE."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)
    return False


def dump_as(uid: int, gid: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Command prefix and further CRIU arguments for a dump of `uid`'s tree; both empty when root may do it as it is."""
    if uid == 0 or may_read_limits_of_others():
        return (), ()
    kept = "+all,-sys_resource"
    identity = ("--reuid", str(uid), "--regid", str(gid), "--clear-groups")
    return ("setpriv", *identity, "--inh-caps", kept, "--ambient-caps", kept, "--"), ("--unprivileged",)


def hand_over(folder: Path, uid: int, gid: int) -> None:
    """Lets CRIU, run by `dump_as`, use its private folder: what is in it is that user's own memory."""
    os.chown(folder, uid, gid)
    for path in folder.iterdir():
        os.chown(path, uid, gid)
