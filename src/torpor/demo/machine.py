"""What the demonstration reads of the machine: memory, and processes that cannot be mistaken for others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
SETTLED_WITHIN = 5.0  # seconds
GROWING = 8 << 20  # bytes of growth in a quarter of a second that are not yet noise

Process = tuple[int, int]  # pid on the node, start time in clock ticks


def memory_available() -> int:
    """Bytes of memory that the machine could give to new programs now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def settled_memory_available() -> int:
    """Like `memory_available`, once it has stopped growing: the kernel needs a moment to collect what was freed."""
    deadline = time.monotonic() + SETTLED_WITHIN
    seen = memory_available()
    while time.monotonic() < deadline:
        time.sleep(0.25)
        before, seen = seen, memory_available()
        if seen - before < GROWING:
            return seen
    return seen


def resident_bytes(pids: Iterable[int]) -> int:
    """Bytes of memory that these processes occupy; what they share counts once for each."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    return total


def identify(pids: Iterable[int]) -> list[Process]:
    """The processes that exist among `pids`."""
    found = ((pid, _start_time(pid)) for pid in pids)
    return [(pid, start) for pid, start in found if start is not None]


def still_there(processes: Iterable[Process]) -> list[Process]:
    """Those of `processes` that have not ended (a zombie has)."""
    return [(pid, start) for pid, start in processes if _start_time(pid) == start]


def descendants(pid: int) -> list[int]:
    """All live processes below `pid`, parents first."""
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        lists = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in threads]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for children in lists for child in children.split()]


def _start_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
