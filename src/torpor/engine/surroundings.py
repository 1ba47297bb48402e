"""What a tree that Torpor did not start shares with processes around it, found by looking only.

A session of Torpor's own has namespaces of its own and shares next to nothing. A tree that is adopted was started by
a terminal, a service manager or a notebook server, and would lose what it shares with them: each such thing is a
sentence that says what to do about it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from torpor.engine import procfs
from torpor.engine.unix_partners import UnixSocket, unix_sockets
from torpor.errors import NotFound

SHARED_MEMORY = "/dev/shm/"
PSEUDO, FIRST_PSEUDO_MAJOR, PSEUDO_MAJORS = "/dev/pts/", 136, 8
CONSOLES = ("/dev/tty", "/dev/console", "/dev/hvc")
STANDARD = {0: "standard input", 1: "standard output", 2: "standard error"}
REPRODUCED = {"mnt": "mount", "pid": "process", "user": "user", "net": "network", "uts": "host name", "ipc": "IPC"}
DESKTOP = (("/tmp/.X11-unix/", "the X11 display"), ("@/tmp/.X11-unix/", "the X11 display"), ("bus", "D-Bus"))

Descriptors = dict[str, tuple[int, int]]  # what is open -> the process and the number of one descriptor of it


def objections(root: int, namespaces: dict[str, str]) -> list[str]:
    """One sentence for each thing that ties the tree below `root` to other processes; empty when nothing does.

    `namespaces` are those of the node, in which the tree is expected.
    """
    tree = procfs.tree(root)
    if not tree:
        return [f"Process {root} has ended."]
    opened = _opened(tree)
    others = [pid for pid in procfs.all_pids() if pid not in set(tree)]
    held = _holders(others, set(opened))
    return [
        *_identities(root, tree, namespaces),
        *_supervisor(root),
        *_relatives(tree, others),
        *_terminals(tree, opened),
        *_streams(opened, held),
        *_unix_partners(opened, others),
        *_shared_memory(tree, others),
        *_deleted_folders(tree),
    ]


def unix_objections(root: int) -> list[str]:
    """Only those about unix sockets: these stand against saving any session."""
    tree = procfs.tree(root)
    return list(_unix_partners(_opened(tree), [pid for pid in procfs.all_pids() if pid not in set(tree)]))


def shared_memory_files(root: int) -> set[str]:
    """Paths below /dev/shm of the files that the tree has open or mapped there, relative to it."""
    return _shared_memory_of(procfs.tree(root))


def _identities(root: int, tree: list[int], own: dict[str, str]) -> Iterator[str]:
    theirs = procfs.namespaces(root)
    foreign = [word for name, word in REPRODUCED.items() if theirs.get(name) != own.get(name)]
    if foreign:
        yield (
            f"It lives in another {' and '.join(foreign)} namespace than Torpor's agent (a container or a sandbox); "
            "start the agent there, and adopt it from there."
        )
    elif not os.path.samestat(os.stat(f"/proc/{root}/root"), os.stat("/")):
        yield "It lives in a changed root folder (chroot), which cannot be reproduced."
    owners = set(procfs.uids(root))
    for pid in tree:
        with contextlib.suppress(NotFound):  # it ended while we looked
            if set(procfs.uids(pid)) - owners:
                yield f"{_called(pid)} runs as another user; only trees of one user can be adopted."


def _supervisor(root: int) -> Iterator[str]:
    parent = procfs.ids(root).parent
    told = procfs.environment(root).get("JPY_PARENT_PID")
    is_kernel = told == str(parent) or any("ipykernel" in word for word in procfs.arguments(root)[:4])
    if parent > 1 and is_kernel and "jupyter" in " ".join(procfs.arguments(parent)):
        yield (
            f"It is a kernel of the Jupyter server {parent}, which would start another one in its place as soon as "
            f"this one is saved and ended. Adopt the whole server: torpor adopt {parent}"
        )


def _relatives(tree: list[int], others: list[int]) -> Iterator[str]:
    members = set(tree)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            found = procfs.ids(pid)
            if found.session in members or found.group in members:
                yield (
                    f"{_called(pid)} belongs to it (same {'session' if found.session in members else 'job'}), but is "
                    "no descendant of it any more and would stay behind; end it first."
                )


def _terminals(tree: list[int], opened: Descriptors) -> Iterator[str]:
    own = _own_terminals(tree)
    for link, (pid, fd) in opened.items():
        terminal = _controlling_terminal(pid) if link == "/dev/tty" else link
        pseudo = terminal.startswith(PSEUDO) and terminal.removeprefix(PSEUDO).isdecimal()
        if (pseudo and terminal.removeprefix(PSEUDO) not in own) or terminal.startswith(CONSOLES):
            yield (
                f"{_called(pid)} has the terminal {link} open ({_of(fd)}), which belongs to another program and would "
                "be lost. Run it in tmux and adopt the tmux server, or start it with: torpor run"
            )


def _controlling_terminal(pid: int) -> str:
    try:
        device = procfs.ids(pid).terminal
    except ProcessLookupError:
        return ""  # it ended while we looked
    pseudo = os.major(device) - FIRST_PSEUDO_MAJOR
    return f"{PSEUDO}{pseudo * 256 + os.minor(device)}" if 0 <= pseudo < PSEUDO_MAJORS else "/dev/console"


def _own_terminals(tree: list[int]) -> set[str]:
    """Numbers of the pseudo-terminals whose master is in the tree."""
    found = set()
    for pid in tree:
        for fd, link in _links(pid):
            if link in ("/dev/ptmx", "/dev/pts/ptmx"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii").splitlines():
                        if line.startswith("tty-index:"):
                            found.add(line.split()[1])
    return found


def _streams(opened: Descriptors, held: dict[str, int]) -> Iterator[str]:
    """Pipes, and sockets of any kind, of which a process outside holds a descriptor."""
    for link, other in held.items():
        pid, fd = opened[link]
        if link.startswith("pipe:"):
            yield (
                f"{_called(pid)} is connected by a pipe ({_of(fd)}) with {_called(other)}, which would stay behind. "
                "Start it with its input and output in files."
            )
        elif link.startswith("socket:"):
            yield (
                f"{_called(pid)} shares an open socket ({_of(fd)}) with {_called(other)}, which would keep it. "
                f"Adopt the process that both come from, or end {_called(other)} first."
            )


def _unix_partners(opened: Descriptors, others: list[int]) -> Iterator[str]:
    own = {int(link[8:-1]): place for link, place in opened.items() if link.startswith("socket:[")}
    if not own:
        return
    sockets = unix_sockets()
    foreign = {}
    for inode, place in own.items():
        found = sockets.get(inode)
        if found and found.connected and found.peer and found.peer not in own:
            foreign[f"socket:[{found.peer}]"] = place, sockets.get(found.peer), found
    holders = _holders(others, set(foreign))
    for link, ((pid, fd), partner, ours) in foreign.items():
        whom = _called(holders[link]) if link in holders else "a process that cannot be seen from here"
        yield (
            f"{_called(pid)} is connected through a unix socket ({_of(fd)}) with {whom}{_service(partner, ours)}, "
            "which would stay behind. Close that connection first."
        )


def _service(partner: UnixSocket | None, ours: UnixSocket) -> str:
    name = (partner.name if partner else "") or ours.name
    known = next((what for part, what in DESKTOP if part in name), None)
    return f" ({known}, {name})" if known else f" ({name})" if name else ""


def _shared_memory(tree: list[int], others: list[int]) -> Iterator[str]:
    for pid in tree:
        if any("/SYSV" in line for line in _maps(pid)):
            yield f"{_called(pid)} uses System V shared memory, which belongs to the whole node and cannot come along."
    own = _shared_memory_of(tree)
    if not own:
        return
    for pid in others:
        both = own & _shared_memory_of([pid])
        if both:
            yield f"It shares {SHARED_MEMORY}{min(both)} with {_called(pid)}, which would stay behind."


def _deleted_folders(tree: list[int]) -> Iterator[str]:
    """CRIU would make such a folder anew, as root, by a path that leads wherever somebody has laid links since."""
    for pid in tree:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            if os.stat(f"/proc/{pid}/cwd").st_nlink == 0:
                yield f"{_called(pid)} works in a folder that was deleted; let it change to another."


def _shared_memory_of(pids: Iterable[int]) -> set[str]:
    found = set()
    for pid in pids:
        links = [link for _, link in _links(pid)]
        mapped = [line[line.index("/") :] for line in _maps(pid) if SHARED_MEMORY in line]
        found |= {path for path in (*links, *mapped) if path.startswith(SHARED_MEMORY)}
    return {path.removeprefix(SHARED_MEMORY) for path in found if not path.endswith(" (deleted)")}


def _opened(tree: list[int]) -> Descriptors:
    found: Descriptors = {}
    for pid in tree:
        for fd, link in _links(pid):
            found.setdefault(link, (pid, fd))
    return found


def _holders(others: list[int], wanted: set[str]) -> dict[str, int]:
    """Which process outside holds what of `wanted`. Only pipes and sockets: files have no other end."""
    wanted = {link for link in wanted if link.startswith(("pipe:", "socket:"))}
    found: dict[str, int] = {}
    for pid in others if wanted else ():
        for _, link in _links(pid):
            if link in wanted:
                found.setdefault(link, pid)
    return found


def _links(pid: int) -> Iterator[tuple[int, str]]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # it ended while we looked
    for name in names:
        with contextlib.suppress(OSError):  # closed while we looked
            yield int(name), os.readlink(f"/proc/{pid}/fd/{name}")


def _maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []  # it ended while we looked


def _of(fd: int) -> str:
    return f"its {STANDARD[fd]}" if fd in STANDARD else f"descriptor {fd}"


def _called(pid: int) -> str:
    return f"Process {procfs.name(pid)} ({pid})"
