"""Examines the machine: for each thing Torpor needs, what is there, what its absence costs and how to get it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from torpor import __version__
from torpor.client import Client
from torpor.engine.criu_binary import HOW_TO_GET, MINIMUM, Criu, candidates, dotted, find_criu
from torpor.errors import SetupError, TorporError
from torpor.paths import Paths
from torpor.setup import machine, proof

LITTLE_DISK = 5 << 30  # bytes; a session or two


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. `cost` and `remedy` are sentences, empty when `ok`."""

    name: str
    ok: bool
    found: str
    cost: str = ""
    remedy: str = ""
    essential: bool = True  # without it no session can be saved


class CriuFacts(msgspec.Struct, frozen=True):
    """The CRIU that will be used; all empty when there is none."""

    path: str | None
    version: str | None
    origin: str | None
    argv: tuple[str, ...] = ()
    proved: bool = False


class AgentFacts(msgspec.Struct, frozen=True):
    """Where this installation's agent listens, and whether it answers."""

    url: str
    answers: bool


class Report(msgspec.Struct, frozen=True):
    """All that `torpor doctor` says. Its fields are a format: add, never rename."""

    ok: bool  # nothing essential is missing
    node: str
    torpor: str
    criu: CriuFacts
    agent: AgentFacts
    checks: list[Check]


def examine(paths: Paths, environ: Mapping[str, str] = os.environ) -> Report:
    """Looks at everything, proving CRIU on the way (about a second). Changes nothing and leaves nothing behind."""
    agent, agent_check = _agent(paths)
    criu, criu_checks = examine_criu(paths, environ)
    checks = [_root(agent.answers), *_kernel(), *criu_checks, _init(), *_storage(paths), _memory(), _gpu()]
    checks += [_jupyter(), agent_check]
    ok = all(check.ok for check in checks if check.essential)
    return Report(ok=ok, node=platform.node(), torpor=__version__, criu=criu, agent=agent, checks=checks)


def examine_criu(paths: Paths, environ: Mapping[str, str] = os.environ) -> tuple[CriuFacts, list[Check]]:
    """Which CRIU there is, and whether it saves and restores a small process on this kernel, as this user."""
    try:
        criu = find_criu(paths, environ)
    except SetupError as error:
        return CriuFacts(None, None, None), [Check("criu", False, error.message, _NO_CRIU, error.hint)]
    if criu is None:
        refused = [f"{found.path}: {found.refusal}" for found in candidates(paths, environ)]
        found = " ".join(refused) or f"no CRIU {dotted(MINIMUM)[:3]} or newer"
        return CriuFacts(None, None, None), [Check("criu", False, found, _NO_CRIU, HOW_TO_GET)]
    located = Check("criu", True, f"{criu.version_text} ({criu.origin}: {criu.path})")
    proved = _proof(criu)
    return CriuFacts(criu.path, criu.version_text, criu.origin, criu.argv, proved.ok), [located, proved]


_NO_CRIU = "No session can be saved or resumed."


def _proof(criu: Criu) -> Check:
    name = "criu at work"
    if os.geteuid() != 0:
        return Check(
            name,
            False,
            "not tried: only root may save processes",
            "Nothing is known about saving and restoring on this kernel.",
            "Run `sudo torpor doctor`.",
            essential=False,
        )
    try:
        seconds = proof.prove(criu)
    except SetupError as error:
        return Check(name, False, error.message, _NO_CRIU, _PRIVILEGES)
    return Check(
        name, True, f"a process with memory, a TCP listener and a thread was saved and restored in {seconds:.1f} s"
    )


_PRIVILEGES = (
    "In a container, start it privileged (CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE at least, no seccomp filter)."
)


def _root(agent_answers: bool) -> Check:
    if os.geteuid() == 0:
        return Check("root", True, "running as root")
    return Check(
        "root",
        False,
        f"running as uid {os.geteuid()}",
        "This user can use a running agent, and cannot set one up or start one.",
        "Run `sudo torpor setup` and `sudo torpor up` once on this machine.",
        essential=not agent_answers,
    )


def _kernel() -> list[Check]:
    complaint = machine.namespaces_complaint() if os.geteuid() == 0 else ""
    lazy, scan = machine.has_userfaultfd(), machine.has_pagemap_scan()
    return [
        Check("kernel", sys.platform == "linux", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Check(
            "namespaces",
            not complaint,
            complaint or "PID, mount and IPC namespaces",
            "No session can be started." if complaint else "",
            _PRIVILEGES if complaint else "",
        ),
        Check(
            "userfaultfd",
            lazy,
            "usable" if lazy else "refused by the kernel",
            "" if lazy else "A session answers only when all of its memory is back, not at once.",
            "" if lazy else "Allow the userfaultfd system call (seccomp), on a kernel built with CONFIG_USERFAULTFD.",
            essential=False,
        ),
        Check(
            "PAGEMAP_SCAN",
            scan,
            "known to the kernel" if scan else "unknown to the kernel",
            "" if scan else "Finding a session's memory takes longer, and so does its freeze.",
            "" if scan else "Linux 6.7 or newer has it.",
            essential=False,
        ),
    ]


def _init() -> Check:
    path, version = machine.init_interpreter()
    return Check("python for sessions' first process", True, f"{path} ({version})")


def _storage(paths: Paths) -> list[Check]:
    place = machine.existing(paths.store)
    free = machine.free_bytes(place)
    return [
        _direct_io(place),
        Check(
            "disk",
            free >= LITTLE_DISK,
            f"{_gib(free)} free for checkpoints at {place}",
            "" if free >= LITTLE_DISK else "A session with more memory than that cannot be hibernated.",
            "" if free >= LITTLE_DISK else "Make room, or set TORPOR_HOME to a folder on a larger disk.",
            essential=False,
        ),
    ]


def _direct_io(place: Path) -> Check:
    if not os.access(place, os.W_OK):
        return Check("direct I/O", True, f"not tried: this user may not write to {place}", essential=False)
    complaint = machine.direct_io_complaint(place)
    if not complaint:
        return Check("direct I/O", True, f"taken by the file system of {place}", essential=False)
    cost = "Checkpoints are written through the page cache: slower, and other programs lose theirs."
    remedy = "Put Torpor's state on ext4, XFS or Btrfs (TORPOR_HOME names another folder)."
    return Check("direct I/O", False, complaint, cost, remedy, essential=False)


def _memory() -> Check:
    total, available = machine.memory()
    return Check("memory", True, f"{_gib(available)} of {_gib(total)} available")


def _gpu() -> Check:
    driver = machine.gpu_driver()
    return Check("GPU", True, driver or "none: sessions live in main memory, and nothing is missing", essential=False)


def _jupyter() -> Check:
    try:
        version = metadata.version("jupyter_client")
    except metadata.PackageNotFoundError:
        return Check(
            "jupyter_client",
            False,
            "not installed beside Torpor",
            "Notebooks cannot be hibernated; `torpor run` works.",
            "Install it where Jupyter is: `pip install 'torpor[jupyter]'`, then `torpor jupyter install`.",
            essential=False,
        )
    return Check("jupyter_client", True, version, essential=False)


def _agent(paths: Paths) -> tuple[AgentFacts, Check]:
    url = f"unix://{paths.agent_socket}"
    try:
        Client(paths).node()
    except TorporError as error:
        cost = "Sessions that run go on, and none can be started, hibernated or resumed."
        remedy = "Start it: `torpor up`, or `systemctl start torpor`."
        return AgentFacts(url, False), Check("agent", False, error.message, cost, remedy, essential=False)
    return AgentFacts(url, True), Check("agent", True, f"answers at {url}", essential=False)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
