"""Which CRIU to run: the first one that is new enough, and the sentence that refuses the others.

A CRIU is looked for in `TORPOR_CRIU` (a program or an unpacked prefix), in this installation's own prefix, in the
prefix that all installations of the machine share, and on the system's PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import SetupError
from torpor.paths import SYSTEM, Paths

MINIMUM = (4, 2, 0)
VERSION_DEADLINE = 20.0  # seconds; `criu --version` takes milliseconds
HOW_TO_GET = "Run `torpor setup`: it unpacks a CRIU that works into Torpor's own folder and changes nothing else."
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # an ordinary user's PATH often lacks them

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Criu:
    """A CRIU that may be used. Run it as `[*criu.argv, "dump", …]`."""

    argv: tuple[str, ...]
    version: Version
    origin: str  # "TORPOR_CRIU", "private prefix", "shared prefix" or "system"

    @property
    def path(self) -> str:
        """The program itself, without the loader in front of it."""
        return self.argv[-1]

    @property
    def version_text(self) -> str:
        """The version as people write it: "4.2.1"."""
        return dotted(self.version)


@dataclass(frozen=True)
class Candidate:
    """A place where a CRIU was found, and the sentence that refuses it (empty: it may be used)."""

    path: str
    origin: str
    argv: tuple[str, ...]
    version: Version | None
    refusal: str


def find_criu(paths: Paths, environ: Mapping[str, str] = os.environ) -> Criu | None:
    """The CRIU to use, or None when there is none that may be used.

    Raises `SetupError` when `TORPOR_CRIU` names something that cannot be used: what was asked for by name is never
    silently replaced.
    """
    for candidate in candidates(paths, environ):
        if candidate.version is not None and not candidate.refusal:
            return Criu(candidate.argv, candidate.version, candidate.origin)
        if candidate.origin == "TORPOR_CRIU":
            raise SetupError(
                f"TORPOR_CRIU names {candidate.path}, which cannot be used: {candidate.refusal}",
                hint="Unset TORPOR_CRIU, or set it to a CRIU of version 4.2 or newer.",
            )
    return None


def require_criu(paths: Paths, environ: Mapping[str, str] = os.environ) -> Criu:
    """Like `find_criu`, but the absence is a `SetupError` that says what was found and refused."""
    criu = find_criu(paths, environ)
    if criu is None:
        refused = [f"{found.path}: {found.refusal}" for found in candidates(paths, environ)]
        raise SetupError(" ".join(["There is no CRIU that Torpor can use.", *refused]), hint=HOW_TO_GET)
    return criu


def candidates(paths: Paths, environ: Mapping[str, str] = os.environ) -> Iterator[Candidate]:
    """Every CRIU found, usable or not, best place first. Runs `criu --version` of each (milliseconds)."""
    named = environ.get("TORPOR_CRIU")
    if named:
        yield _candidate(Path(named).absolute(), "TORPOR_CRIU")
        return
    prefixes = {paths.criu: "private prefix", SYSTEM.criu: "shared prefix"}
    for prefix, origin in prefixes.items():
        if prefix.is_dir():
            yield _candidate(prefix, origin)
    on_path = shutil.which("criu", path=os.pathsep.join((environ.get("PATH", os.defpath), *_SBIN)))
    if on_path:
        yield _candidate(Path(on_path), "system")


def refusal(version: Version) -> str:
    """Why a CRIU of this version cannot be used; empty when it can."""
    if version >= MINIMUM:
        return ""
    reason = (
        "it cannot start on current kernels, whose vDSO it does not know"
        if version < (4, 0, 0)
        else "it cannot save a process with a TCP socket on kernels since 6.16, which refuse SO_PASSCRED there"
    )
    return f"CRIU {dotted(version)} is older than {dotted(MINIMUM)[:3]}: {reason}."


def dotted(version: Version) -> str:
    """(4, 2, 1) as "4.2.1"."""
    return ".".join(str(part) for part in version)


def prefix_argv(prefix: Path) -> tuple[str, ...] | None:
    """How to run the CRIU unpacked below `prefix` with the libraries and the loader unpacked beside it.

    None when the prefix holds no CRIU or no loader. The system's own libraries are neither used nor changed.
    """
    program = prefix / "usr" / "sbin" / "criu"
    loaders = [*prefix.glob("usr/lib*/ld-linux*.so.*"), *prefix.glob("usr/lib/*/ld-linux*.so.*")]
    libraries = sorted(str(folder) for folder in prefix.glob("usr/lib/*-linux-gnu*") if folder.is_dir())
    if not (program.is_file() and loaders and libraries):
        return None
    return (str(loaders[0]), "--inhibit-cache", "--library-path", ":".join(libraries), str(program))


def _candidate(place: Path, origin: str) -> Candidate:
    argv = prefix_argv(place) if place.is_dir() else (str(place),)
    if argv is None:
        return Candidate(str(place), origin, (), None, "the folder holds no complete CRIU.")
    try:
        identity = (argv, os.stat(argv[-1]).st_mtime_ns)
    except OSError as error:
        return Candidate(argv[-1], origin, argv, None, f"it cannot be read ({error.strerror}).")
    if identity not in _ANSWERS:
        _ANSWERS[identity] = _ask_version(argv)
    version, complaint = _ANSWERS[identity]
    return Candidate(argv[-1], origin, argv, version, complaint if version is None else refusal(version))


_ANSWERS: dict[tuple[tuple[str, ...], int], tuple[Version | None, str]] = {}


def _ask_version(argv: tuple[str, ...]) -> tuple[Version | None, str]:
    command = [*argv, "--version"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_DEADLINE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"it does not start ({error})."
    found = re.search(rb"^Version: (\d+)\.(\d+)(?:\.(\d+))?", answer.stdout, re.MULTILINE)
    if found is None:
        said = (answer.stderr or answer.stdout).decode(errors="replace").strip().splitlines() or ["no output"]
        return None, f"it does not tell its version (exit status {answer.returncode}: {said[-1]})."
    major, minor, patch = found.groups(default=b"0")
    return (int(major), int(minor), int(patch)), ""
