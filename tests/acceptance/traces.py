"""What an operation may leave behind on a node, as it is now: compared before and after, it must be the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tests.installation import Installation, eventually

from torpor.engine import procfs

KEPT_BY_CRIU = {"criu.kdat", "criu.kdat.tmp"}  # what it learned of this kernel, one file for the whole machine
FILES = "temporary files"
RULES = (["nft", "list", "ruleset"], ["iptables-save"], ["ip6tables-save"])


def traces(agent: Installation) -> dict[str, Any]:
    """Everything of this installation, and of CRIU, that is on the node now, without the numbers that always change."""
    node = agent.client.node()
    ours = processes(agent)
    return {
        "processes": Counter(ours.values()),
        "namespaces": len({tuple(procfs.namespaces(pid).items()) for pid in ours}),
        "mounts": Counter(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if re.search("criu|crtools|torpor", folder)],
        "rules": [rules for command in RULES if (rules := _output(command)) is not None],
        "agent's descriptors": _descriptors(node["agent"]["pid"]),
        "keeper's descriptors": _descriptors(node["keeper"]["pid"]),
        FILES: _temporary_files(agent),
    }


def assert_as_before(agent: Installation, before: dict[str, Any]) -> None:
    """Everything is as it was, as soon as what has just ended is gone."""
    eventually(lambda: _differences(before, traces(agent)), lambda found: not found, 15)


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


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What differs; of files only new ones count, as others on this machine come and go."""
    found = {name: (before[name], now[name]) for name in before if before[name] != now[name]}
    added = sorted(set(now[FILES]) - set(before[FILES]))
    return {name: both for name, both in found.items() if name != FILES} | ({FILES: added} if added else {})


def _descriptors(pid: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[re.sub(r"\[\d+\]", "", os.readlink(f"/proc/{pid}/fd/{fd}"))] += 1
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def _temporary_files(agent: Installation) -> list[str]:
    paths = agent.paths
    folders = (paths.run, paths.scratch, paths.store / "incoming", Path("/dev/shm"))
    found = [str(path) for folder in folders if folder.exists() for path in folder.iterdir()]
    for folder in (Path("/tmp"), Path("/run")):
        found += [str(path) for path in folder.iterdir() if re.match(r"\.criu|crtools|link_remap", path.name)]
    return sorted(name for name in found if os.path.basename(name) not in KEPT_BY_CRIU)


def _output(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("#"))
