"""Whether a checkpoint can be restored here: a pure comparison of its record with this node's facts."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import msgspec

from torpor.engine import procfs
from torpor.engine.criu_binary import Version, dotted

NEEDED_BESIDE_MEMORY = 64 << 20


class Host(msgspec.Struct, frozen=True):
    """What of a node decides whether a tree saved on it can run on another. Sizes in bytes."""

    node: str
    boot_id: str
    architecture: str
    kernel: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    criu: Version
    page_size: int
    memory_total: int
    memory_available: int


def this_host(criu: Version) -> Host:
    """The facts of this node, now."""
    processor = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    memory = Path("/proc/meminfo").read_text(encoding="ascii")
    return Host(
        node=platform.node(),
        boot_id=procfs.boot_id(),
        architecture=platform.machine(),
        kernel=platform.release(),
        cpu_model=_first(r"^model name\s*: (.*)$", processor),
        cpu_flags=tuple(sorted(_first(r"^(?:flags|Features)\s*: (.*)$", processor).split())),
        criu=criu,
        page_size=os.sysconf("SC_PAGESIZE"),
        memory_total=int(_first(r"^MemTotal:\s+(\d+) kB", memory) or 0) << 10,
        memory_available=int(_first(r"^MemAvailable:\s+(\d+) kB", memory) or 0) << 10,
    )


def objections(saved: Host, here: Host, *, memory: int, missing: tuple[str, ...] = ()) -> list[str]:
    """Why a tree of `memory` bytes saved on `saved` cannot be restored on `here`; empty when it can.

    `missing` are paths that the session needs and that do not exist here.
    """
    reasons = []
    if saved.architecture != here.architecture:
        reasons.append(f"It was saved on {saved.architecture}; this node is {here.architecture}.")
    if saved.page_size != here.page_size:
        reasons.append(f"It was saved with memory pages of {saved.page_size} bytes; here they have {here.page_size}.")
    absent = sorted(set(saved.cpu_flags) - set(here.cpu_flags))
    if absent:
        reasons.append(
            f"Its processor ({saved.cpu_model}) has features that this one ({here.cpu_model}) lacks: "
            f"{', '.join(absent[:8])}."
        )
    if _release(saved.kernel) > _release(here.kernel):
        reasons.append(f"It was saved under Linux {saved.kernel}; this node runs the older {here.kernel}.")
    if saved.criu > here.criu:
        reasons.append(f"It was saved by CRIU {dotted(saved.criu)}; this node has the older {dotted(here.criu)}.")
    needed = memory + NEEDED_BESIDE_MEMORY
    if here.memory_available and needed > here.memory_available:
        reasons.append(
            f"It needs {needed >> 20} MiB of memory; this node has {here.memory_available >> 20} MiB available."
        )
    reasons += [f"{path} does not exist on this node." for path in missing]
    return reasons


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1) if found else ""


def _release(kernel: str) -> tuple[int, ...]:
    """(6, 18) of "6.18.44-…": point releases do not matter."""
    return tuple(int(number) for number in re.findall(r"\d+", kernel)[:2])
