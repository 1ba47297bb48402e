"""What an operation may leave behind on a node, as it is now: compared before and after, it must be the same."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tests.installation import Installation, eventually

from torpor.engine import procfs

FILES = "temporary files"
OTHERS = "others at work"
RULES = (["nft", "list", "ruleset"], ["iptables-save"], ["ip6tables-save"])


def traces(agent: Installation) -> dict[str, Any]:
    """Everything of this installation, and of CRIU, that is on the node now, without the numbers that always change."""
    node = agent.client.node()
    ours = processes(agent)
    return {
        "processes": Counter(ours.values()),
        "namespaces": len({tuple(procfs.namespaces(pid).items()) for pid in ours}),
        "mounts": Counter(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if _ours(line, agent)),
        "cgroups": [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if re.search("criu|crtools|torpor", folder)],
        "rules": [rules for command in RULES if (rules := _output(command)) is not None],
        "agent's descriptors": _descriptors(node["agent"]["pid"]),
        "keeper's descriptors": _descriptors(node["keeper"]["pid"]),
        FILES: _temporary_files(agent),
        OTHERS: _others_are_at_work(agent),
    }


def assert_as_before(agent: Installation, before: dict[str, Any]) -> None:
    """Everything is as it was, as soon as what has just ended is gone."""
    eventually(lambda: _differences(agent, before, traces(agent)), lambda found: not found, 15)


def processes(agent: Installation) -> dict[int, str]:
    """Every process of this installation, its sessions' included, by pid: what it is, without pids and paths."""
    found = {}
    trees = {pid for session in agent.client.sessions() for pid in session["pids"]}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        if pid in trees or str(agent.home) in command or f"TORPOR_HOME={agent.home}\0" in environment:
            found[pid] = re.sub(r"\d+", "N", command.replace("\0", " ").strip())[:200]
    return found


def _differences(agent: Installation, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What differs. Of files only new ones count, and while others are at work here only those that must be ours."""
    both = {name: (before[name], now[name]) for name in before if name not in (FILES, OTHERS)}
    found: dict[str, Any] = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    added = [name for name in now[FILES] if name not in before[FILES]]
    if before[OTHERS] or now[OTHERS]:
        added = [name for name in added if name.startswith(str(agent.home))]
    return found | ({FILES: added} if added else {})


def _descriptors(pid: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[re.sub(r"\[\d+\]", "", os.readlink(f"/proc/{pid}/fd/{fd}"))] += 1
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def _ours(mount: str, agent: Installation) -> bool:
    """Not one of another test on this machine, which may come and go."""
    return str(agent.home) in mount or not re.search("/torpor-|/pytest-", mount)


def _temporary_files(agent: Installation) -> list[str]:
    paths = agent.paths
    found = [str(path) for folder in (paths.run, paths.scratch, paths.store / "incoming") for path in _inside(folder)]
    for folder in (Path("/tmp"), Path("/run"), Path("/dev/shm")):
        found += [str(path) for path in _inside(folder) if re.match(r"\.criu|crtools|link_remap", path.name)]
    return sorted(found)


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def _others_are_at_work(agent: Installation) -> bool:
    """Whether another installation has a keeper on this machine."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            commands.append(path.read_bytes().decode(errors="replace"))
    return any("torpor.engine.keeper" in command and str(agent.home) not in command for command in commands)


def _output(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("#"))
