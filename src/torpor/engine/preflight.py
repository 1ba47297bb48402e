"""What in a tree cannot be saved, found by looking only: nothing is stopped, traced or changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from torpor.engine import privileges, procfs, surroundings
from torpor.errors import NotFound

# What the link of an open descriptor starts with -> why CRIU cannot save it (criu/files.c, CRIU 4.2).
UNSAVABLE = {
    "anon_inode:[io_uring]": "an io_uring ring, which CRIU cannot save (uvloop, Node.js: set UV_USE_IO_URING=0; "
    "newer ones heed only the sysctl kernel.io_uring_disabled = 2)",
    "anon_inode:[perf_event]": "a performance counter, which CRIU cannot save",
    "anon_inode:[userfaultfd]": "a userfaultfd, which CRIU cannot save",
    "anon_inode:[fanotify]": "a fanotify group, which CRIU cannot save",
    "anon_inode:kvm": "a virtual machine, which CRIU cannot save",
    "/dev/nvidia": "an NVIDIA GPU file; GPU memory cannot be saved yet",
    "/dev/dri/": "a GPU file, which cannot be saved yet",
    "/dev/kfd": "an AMD GPU file, which cannot be saved yet",
    "/dev/infiniband/": "an InfiniBand device, which CRIU cannot save",
    "/dev/gdrdrv": "a GPUDirect file, which CRIU cannot save",
    "/dev/fuse": "a FUSE connection, which CRIU cannot save",
}
NESTABLE = ("pid", "mnt", "user", "net", "ipc", "uts")


def objections(init_pid: int, terminal: str | None = None, *, around: dict[str, str] | None = None) -> list[str]:
    """One sentence for each thing below `init_pid` that cannot be saved; empty when nothing stands against it.

    `terminal` is the session's own terminal, whose other end is outside the tree. `around` are the node's
    namespaces for an adopted tree that still runs in them.
    """
    found = surroundings.objections(init_pid, around) if around else surroundings.unix_objections(init_pid)
    sockets = _bound_sockets(init_pid)
    device = os.stat(terminal).st_rdev if terminal else None
    expected = procfs.namespaces(init_pid)
    for pid in procfs.tree(init_pid):
        name = _name(pid)
        found += [f"Process {name} ({pid}) {objection}." for objection in _objections(pid, expected, device, sockets)]
    return list(dict.fromkeys(found))


def _objections(pid: int, expected: dict[str, str], terminal: int | None, sockets: dict[str, str]) -> Iterator[str]:
    try:
        maps = {line.split(maxsplit=5)[5].strip() for line in _lines(pid, "maps") if len(line.split(maxsplit=5)) == 6}
        status = dict(line.split(":\t", 1) for line in _lines(pid, "status") if ":\t" in line)
        namespaces = procfs.namespaces(pid)
        _, _, session, controlling, foreground = map(int, _lines(pid, "stat")[0].rpartition(")")[2].split()[1:6])
        of_descriptors = list(
            _of_descriptors(pid, on_terminal=controlling == terminal, in_foreground=foreground == session)
        )
        of_descriptors += _of_sockets(pid, sockets)
    except (FileNotFoundError, ProcessLookupError, NotFound):
        return  # it ended while we looked
    yield from of_descriptors
    for mapped in maps:
        for start, why in UNSAVABLE.items():
            if mapped.startswith(start):
                yield f"has mapped {why}"
    if int(status.get("TracerPid", "0")):
        yield f"is being debugged by process {status['TracerPid'].strip()}"
    for kind in NESTABLE:
        if namespaces.get(kind) != expected.get(kind):
            yield f"is in a {kind} namespace of its own (a container or sandbox inside the session)"


def _of_descriptors(pid: int, *, on_terminal: bool, in_foreground: bool) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            for start, why in UNSAVABLE.items():
                if link.startswith(start):
                    yield f"has {why} (descriptor {fd})"
            if link == "anon_inode:[eventfd]" and "eventfd-semaphore: 1" in _lines(pid, f"fdinfo/{fd}"):
                yield f"has an eventfd in semaphore mode, which CRIU would bring back as a plain one (descriptor {fd})"
            if link == "/dev/tty" and on_terminal:
                yield f"has /dev/tty open (descriptor {fd}), which CRIU cannot save when the terminal is outside"
            elif link == "/dev/tty" and not in_foreground:
                yield (
                    f"has /dev/tty open (descriptor {fd}), which CRIU can save only while no other job is in the "
                    "foreground of that terminal (dash keeps it open, bash and zsh do not)"
                )


def _cannot_ask_for_names(init_pid: int) -> bool:
    """CRIU asks the kernel where a socket's name is, unless it has to work as the session's user."""
    return procfs.uids(init_pid)[1] != 0 and not privileges.may_read_limits_of_others()


def _bound_sockets(init_pid: int) -> dict[str, str]:
    """Unix sockets that may not come back at their names: link of their descriptor to that name."""
    relative = _cannot_ask_for_names(init_pid)
    fields = [line.split(maxsplit=7) for line in _lines("net", "unix")[1:]]
    named = {f"socket:[{one[6]}]": one[7] for one in fields if len(one) == 8 and not one[7].startswith("@")}
    return {link: name for link, name in named.items() if name.startswith("/dev/shm/") or (relative and name[0] != "/")}


def _of_sockets(pid: int, sockets: dict[str, str]) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd") if sockets else []:
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            name = sockets.get(os.readlink(f"/proc/{pid}/fd/{fd}"))
            if name is None:
                continue
            if not name.startswith("/") and not os.path.exists(f"/proc/{pid}/cwd/{name}"):
                yield f"has a socket bound to {name}, which CRIU does not find from its folder (descriptor {fd})"
            elif any(os.path.islink(f"/proc/{pid}/root{parent}") for parent in PurePosixPath(name).parents):
                yield f"has a socket bound to {name}, which leads through a link (descriptor {fd})"


def _lines(pid: int | str, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "?"
