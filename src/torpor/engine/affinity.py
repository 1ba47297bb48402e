"""What CRIU does not bring back: the processors that a session's threads are bound to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torpor.engine import procfs


def of_tree(init_pid: int) -> dict[str, list[int]]:
    """The processors that each thread of a tree may use, by its id inside the session."""
    found = {}
    for pid in procfs.tree(init_pid):
        for thread in _threads(pid):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                found[str(_inner_id(pid, thread))] = sorted(os.sched_getaffinity(thread))
    return found


def bind(init_pid: int, saved: dict[str, list[int]]) -> None:
    """Binds the threads of a restored tree as `of_tree` found them, as far as those processors exist here."""
    here = set(range(os.cpu_count() or 1))
    for pid in procfs.tree(init_pid):
        for thread in _threads(pid):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                wanted = here & set(saved.get(str(_inner_id(pid, thread)), ()))
                if wanted and wanted != os.sched_getaffinity(thread):
                    os.sched_setaffinity(thread, wanted)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _inner_id(pid: int, thread: int) -> int:
    for line in Path(f"/proc/{pid}/task/{thread}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise FileNotFoundError(f"thread {thread}")
