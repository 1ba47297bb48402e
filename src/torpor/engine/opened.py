"""What a tree has open by name, to see after a restore that CRIU opened the same.

CRIU opens by path, with root's rights, what a session had open. Whoever lays a symbolic link there while the session is
away must not get another file opened that way. Only what was opened tells: a look at the path before could be outrun.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torpor.engine import procfs

NO_NAME = " (deleted)"  # how the kernel marks a path that does not lead to the file any more
HELD_OUTSIDE = "/dev/pts/"  # the session's terminal, which may have another number when it is back


def names(init_pid: int) -> dict[str, dict[str, str]]:
    """By pid inside the session: what its descriptors, folders and program lead to, and every file it has mapped."""
    return {str(procfs.nspid(pid)): dict(_names(pid)) for pid in procfs.tree(init_pid)}


def others(saved: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """The paths that should be open in a restored tree, which does not run yet, and where another file is instead."""
    found: list[str] = []
    for pid, present in now.items():
        before = saved.get(pid, {})
        mapped = {path for what, path in before.items() if what.startswith("map ")}
        for what, path in present.items():
            if path.endswith(NO_NAME) or path.startswith(HELD_OUTSIDE):
                continue
            if what.startswith("map "):
                if not any(_is_same(one, path) for one in mapped):
                    found.append(path)
            elif not _is_same(before.get(what, path), path):
                found.append(before[what])
    return list(dict.fromkeys(found))


def _is_same(before: str, now: str) -> bool:
    """Whether a path is the one it was. What had no name any more has one that CRIU gave it, in the same folder."""
    return before == now or (before.endswith(NO_NAME) and os.path.dirname(before) == os.path.dirname(now))


def _names(pid: int) -> Iterator[tuple[str, str]]:
    proc = Path(f"/proc/{pid}")
    links = [*(f"fd/{fd}" for fd in os.listdir(proc / "fd")), "cwd", "root", "exe"]
    for link in links:
        with contextlib.suppress(FileNotFoundError):  # a thread group without its leader has none
            path = os.readlink(proc / link)
            if path.startswith("/"):
                yield link, path
    with open(proc / "maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                yield f"map {fields[0]}", fields[5]
