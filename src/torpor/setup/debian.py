"""Fetches packages from a newer Debian suite without the machine's own packages noticing.

apt runs with its own lists, cache, sources and (empty) package status below one folder, so nothing is installed,
upgraded or pinned. The mirror, proxies and credentials are the machine's own; what arrives is checked against the
machine's own archive keys, by apt, as for any package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from torpor.errors import SetupError

_UPDATE_DEADLINE = 300.0  # seconds; the lists are about 10 MB
_DOWNLOAD_DEADLINE = 900.0
_UNPACK_DEADLINE = 120.0
_UNCHANGED = "Nothing on this machine was changed."
_TRY_AGAIN = "See whether `apt-get update` works, then run `torpor setup` again: it goes on where it stopped."

_NO_KEY = (
    "This machine does not know the key that signs the suite. "
    "`apt-get install --only-upgrade debian-archive-keyring` brings it; then run `torpor setup` again."
)
_STALE = (
    "See whether this machine's clock is right. A mirror that is frozen on purpose is accepted where apt's own "
    "configuration accepts it (Acquire::Check-Valid-Until)."
)
_ADVICE = {"NO_PUBKEY": _NO_KEY, "Missing key": _NO_KEY, "not signed": _NO_KEY, "is expired": _STALE}  # gpgv, sqv, apt

# What of the machine's apt configuration says how to reach the archive; its hooks and pins are for its own packages.
_CARRIED = ("Acquire::", "APT::Architecture", "APT::Sandbox", "Dir::Etc::netrc")
_NOT_CARRIED = ("Acquire::IndexTargets", "Acquire::Languages", "Acquire::Changelogs", "Acquire::CompressionTypes")
_KEYRINGS = ("/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp")


def require_debian(os_release: Path = Path("/etc/os-release")) -> None:
    """Raises `SetupError` where there is no Debian with apt and dpkg."""
    facts = _os_release(os_release)
    if facts.get("ID") != "debian" or not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        name = facts.get("PRETTY_NAME", "This system")
        raise SetupError(
            f"{name} is not Debian: Torpor knows how to fetch CRIU from Debian's archive only.",
            safe=_UNCHANGED,
            hint="Install CRIU 4.2 or newer yourself, then let TORPOR_CRIU name it if it is not on the PATH.",
        )


class PrivateApt:
    """apt below `folder`, looking at one suite of the machine's own mirror. What it downloaded before is used again."""

    def __init__(self, folder: Path, suite: str, mirror: str) -> None:
        """Writes the configuration. Raises `OSError` when the folder cannot be written."""
        self.archives = folder / "archives"
        self._configuration = folder / "apt.conf"
        self._suite = suite
        for part in ("lists/partial", "archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        (folder / "debian.sources").write_text(_source(mirror, suite))
        own = {
            "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::Etc::sourcelist": str(folder / "debian.sources"),
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": str(folder / "lists"),
            "Dir::State::status": str(folder / "status"),  # empty: every library counts as missing, and is fetched
            "Dir::State::extended_states": str(folder / "extended_states"),
            "Dir::Cache": str(folder),
            "Dir::Cache::archives": str(self.archives),
            "Dir::Log": str(folder),
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Acquire::http::Timeout": "30",
            "Acquire::https::Timeout": "30",
        }
        lines = [*_machine_configuration(), *(f'{name} "{value}";' for name, value in own.items())]
        self._configuration.write_text("\n".join(lines) + "\n")

    def update(self) -> None:
        """Fetches the suite's signed lists. Raises `SetupError` (no network, no such suite, no key)."""
        self._apt(
            ["update"], _UPDATE_DEADLINE, f"The package lists of Debian's suite {self._suite} could not be fetched"
        )

    def download(self, package: str) -> list[Path]:
        """Downloads a package and everything that it needs, libc included; the paths of the `.deb` files.

        Raises `SetupError`. Sizes and digests were checked by apt against the signed lists.
        """
        arguments = ["install", "--download-only", "--yes", "--no-install-recommends", package]
        self._apt(arguments, _DOWNLOAD_DEADLINE, f"The package {package} could not be downloaded")
        return sorted(self.archives.glob("*.deb"))

    def _apt(self, arguments: list[str], deadline: float, complaint: str) -> None:
        environment = {**os.environ, "APT_CONFIG": str(self._configuration), "LC_ALL": "C"}
        status, output = run(["apt-get", "--quiet", *arguments], deadline, environment)
        if status == 0:
            return
        errors = [line[2:].strip() for line in output.splitlines() if line.startswith("E:")]
        reason = " ".join(errors) or f"apt-get ended with {status}"
        hint = next((advice for words, advice in _ADVICE.items() if words in output), _TRY_AGAIN)
        raise SetupError(f"{complaint}: {reason}", safe=_UNCHANGED, hint=hint)


def mirrors() -> list[str]:
    """Addresses of Debian's archive in the machine's apt configuration, the likeliest first.

    Raises `SetupError` when the configuration names none.
    """
    columns = "$(CREATED_BY)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)"
    status, output = run(["apt-get", "indextargets", "--format", columns], _UNPACK_DEADLINE)
    found: dict[str, bool] = {}
    own_suites = {_os_release().get("VERSION_CODENAME", ""), "stable", "oldstable", "testing", "unstable", "sid"}
    for line in output.splitlines() if status == 0 else []:
        kind, address, suite, component, origin = [*line.split("|"), "", "", "", ""][:5]
        if kind == "Packages" and component == "main" and suite in own_suites and not address.startswith("cdrom:"):
            found[address.rstrip("/")] = origin == "Debian"
    if not found:
        raise SetupError(
            "This machine's apt configuration names no mirror of Debian's archive.",
            safe=_UNCHANGED,
            hint="Add one to /etc/apt/sources.list.d, or install CRIU 4.2 or newer and let TORPOR_CRIU name it.",
        )
    return sorted(found, key=lambda address: not found[address])


def unpack(packages: list[Path], prefix: Path) -> None:
    """Unpacks `.deb` files below `prefix` without running their scripts. Raises `SetupError`."""
    for package in packages:
        status, output = run(["dpkg-deb", "--extract", str(package), str(prefix)], _UNPACK_DEADLINE)
        if status != 0:
            package.unlink()  # fetched again by the next attempt
            raise SetupError(
                f"{package.name} could not be unpacked: {output.strip()}", safe=_UNCHANGED, hint=_TRY_AGAIN
            )


def run(command: list[str], deadline: float, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output (both streams) of a command; 124 when it did not end within `deadline` seconds."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=deadline,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"E: no end after {deadline:.0f} s"
    except OSError as error:
        return 127, f"E: {error}"
    return done.returncode, done.stdout.decode(errors="replace")


def _source(mirror: str, suite: str) -> str:
    keyring = next((f"Signed-By: {path}\n" for path in _KEYRINGS if Path(path).exists()), "")
    return f"Types: deb\nURIs: {mirror}\nSuites: {suite}\nComponents: main\n{keyring}"


def _machine_configuration() -> list[str]:
    _, output = run(["apt-config", "dump"], _UNPACK_DEADLINE)
    return [line for line in output.splitlines() if line.startswith(_CARRIED) and not line.startswith(_NOT_CARRIED)]


def _os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name: value.strip("\"'") for name, _, value in pairs}
