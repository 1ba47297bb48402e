"""Brings a CRIU that works onto this machine, into Torpor's own folder.

What is unpacked is proved before it gets its final name, so that a prefix either works or is not there; an attempt
that was cut short goes on with what it had downloaded.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torpor.engine.criu_binary import Criu, candidates, find_criu, prefix_argv
from torpor.errors import SetupError
from torpor.paths import Paths
from torpor.setup import debian, proof

SUITE = "forky"  # the first Debian whose CRIU knows current kernels
PACKAGE = "criu"

Progress = Callable[[str], None]  # gets one sentence for each step that begins


def ensure_criu(paths: Paths, progress: Progress) -> Criu:
    """The CRIU to use: the one that is there when there is one, else a new one in this installation's prefix.

    Raises `SetupError`. Where a CRIU works already nothing is written and nothing is fetched.
    """
    return find_criu(paths) or provision(paths, progress, replace=False)


def provision(paths: Paths, progress: Progress, *, replace: bool = True) -> Criu:
    """Fetches CRIU and its libraries from Debian, proves that they work, and puts them at `paths.criu`.

    Replaces what is there; with `replace` false a CRIU that somebody else put there meanwhile is used instead.
    Raises `SetupError`; `paths.criu` is then as it was.
    """
    debian.require_debian()
    try:
        with _workshop(paths) as workshop:
            existing = None if replace else find_criu(paths)
            return existing or _provision(paths, workshop, progress)
    except PermissionError as error:
        raise SetupError(
            f"{error.filename} may not be written by this user.",
            safe="Nothing on this machine was changed.",
            hint="Run `torpor setup` as root, or set TORPOR_HOME to a folder of your own.",
        ) from None
    except OSError as error:
        raise SetupError(
            f"CRIU could not be unpacked: {error}.",
            safe="Nothing outside of Torpor's own folder was changed.",
            hint="Make room (about 100 MB), then run `torpor setup` again: it goes on where it stopped.",
        ) from None


def _provision(paths: Paths, workshop: Path, progress: Progress) -> Criu:
    apt = _reach_archive(workshop / "apt", progress)
    progress("Downloading CRIU and its libraries")
    packages = apt.download(PACKAGE)
    progress(f"Unpacking {len(packages)} packages into {paths.criu}")
    fresh = Path(tempfile.mkdtemp(prefix="unpacked-", dir=workshop))
    fresh.chmod(0o755)
    debian.unpack(packages, fresh)
    (fresh / "packages.txt").write_text("".join(f"{package.name}\n" for package in packages))
    _prove(fresh, progress)
    _put_in_place(fresh, paths.criu, workshop)
    criu = find_criu(paths, {"TORPOR_CRIU": str(paths.criu)})
    if criu is None:
        raise SetupError(f"{paths.criu} vanished while it was set up.", hint="Run `torpor setup` again.")
    return Criu(criu.argv, criu.version, "private prefix")


def _reach_archive(folder: Path, progress: Progress) -> debian.PrivateApt:
    progress(f"Asking Debian's archive for {PACKAGE} (suite {SUITE})")
    *others, last = debian.mirrors()
    for mirror in others:
        apt = debian.PrivateApt(folder, SUITE, mirror)
        try:
            apt.update()
        except SetupError as error:
            progress(f"Trying the next mirror: {error.message}")
        else:
            return apt
    apt = debian.PrivateApt(folder, SUITE, last)
    apt.update()
    return apt


def _prove(prefix: Path, progress: Progress) -> None:
    (found,) = candidates(Paths(prefix, prefix, prefix), {"TORPOR_CRIU": str(prefix)})
    if found.version is None or found.refusal:
        raise SetupError(
            f"The CRIU that Debian's suite {SUITE} holds cannot be used here: {found.refusal}",
            safe="Nothing on this machine was changed.",
            hint="Install CRIU 4.2 or newer yourself and let TORPOR_CRIU name it.",
        )
    if os.geteuid() == 0:  # CRIU saves processes for root only; any user may unpack it
        progress("Proving it: a small process is saved and restored")
        proof.prove(Criu(prefix_argv(prefix) or found.argv, found.version, "private prefix"))


def _put_in_place(fresh: Path, prefix: Path, workshop: Path) -> None:
    if prefix.exists():
        prefix.rename(Path(tempfile.mkdtemp(prefix="replaced-", dir=workshop)) / "criu")
    fresh.rename(prefix)


@contextmanager
def _workshop(paths: Paths) -> Iterator[Path]:
    """A folder beside the prefix (so that a rename is enough), held by one set-up at a time."""
    paths.criu.parent.mkdir(parents=True, exist_ok=True)
    workshop = paths.criu.with_name("criu.setup")
    lock = os.open(paths.criu.with_name("criu.setup.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        workshop.mkdir(exist_ok=True)
        for leftover in [*workshop.glob("unpacked-*"), *workshop.glob("replaced-*")]:
            shutil.rmtree(leftover)
        yield workshop
        shutil.rmtree(workshop)  # kept after an error: the next attempt goes on with what was downloaded
    finally:
        os.close(lock)
