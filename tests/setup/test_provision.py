"""CRIU really fetched from Debian's archive, and what is said when it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torpor.engine.criu_binary import Criu, find_criu
from torpor.errors import SetupError
from torpor.paths import Paths
from torpor.setup import debian, proof, provision

Provisioned = tuple[Paths, Criu, list[str]]

NOBODY = 65534


def _system_state() -> tuple[str, list[str], list[str]]:
    packages = subprocess.run(["dpkg-query", "--show"], capture_output=True, text=True, check=True).stdout
    lists = sorted(entry.name for entry in os.scandir("/var/lib/apt/lists") if entry.is_file())
    sources = sorted(str(path) for path in Path("/etc/apt").rglob("*"))
    return packages, lists, sources


def test_the_prefix_works_and_nothing_else_is_left(provisioned: Provisioned) -> None:
    paths, criu, said = provisioned
    assert criu.version >= (4, 2, 0)
    assert all(argument.startswith(str(paths.criu)) for argument in criu.argv if argument.startswith("/"))
    assert sorted(entry.name for entry in paths.state.iterdir()) == ["criu", "criu.setup.lock"]
    assert "criu" in (paths.criu / "packages.txt").read_text()
    assert len(said) >= 4
    assert proof.prove(criu) > 0


def test_what_works_is_not_fetched_again(provisioned: Provisioned) -> None:
    paths, criu, _ = provisioned
    said: list[str] = []
    assert provision.ensure_criu(paths, said.append) == criu
    assert said == []


def test_the_system_is_not_touched_and_an_attempt_goes_on_where_it_stopped(
    home: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _system_state()

    def refuse(_: Criu) -> float:
        raise SetupError("It does not work here.")

    with monkeypatch.context() as patch:
        patch.setattr(proof, "prove", refuse)
        with pytest.raises(SetupError, match="does not work here"):
            provision.provision(home, lambda _: None)
    assert not home.criu.exists()

    (downloaded,) = (home.state / "criu.setup" / "apt" / "archives").glob("criu_*.deb")
    identity = downloaded.stat().st_ino
    found_again: list[bool] = []

    def watch(sentence: str) -> None:
        if sentence.startswith("Unpacking"):
            found_again.append(downloaded.stat().st_ino == identity)

    criu = provision.provision(home, watch)
    assert found_again == [True]
    assert find_criu(home) == criu
    assert _system_state() == before


def test_a_failed_attempt_keeps_the_criu_that_was_there(home: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    home.criu.mkdir(parents=True)
    (home.criu / "mark").touch()

    def no_mirror() -> list[str]:
        raise SetupError("No mirror.")

    monkeypatch.setattr(debian, "mirrors", no_mirror)
    with pytest.raises(SetupError, match="No mirror"):
        provision.provision(home, lambda _: None)
    assert (home.criu / "mark").exists()


def test_without_a_network_it_says_so(home: Paths, tmp_path: Path) -> None:
    error = _provision_elsewhere(["unshare", "--net"], tmp_path / "home")
    assert "could not be fetched" in error["message"]
    assert error["safe"] == "Nothing on this machine was changed."
    assert "apt-get update" in error["hint"]
    assert not home.criu.exists()


def _provision_elsewhere(inside: list[str], folder: Path) -> dict[str, str]:
    script = (
        "import json\nfrom torpor.errors import SetupError\nfrom torpor.paths import from_environment\n"
        "from torpor.setup import provision\n"
        "try: provision.provision(from_environment(), lambda _: None)\n"
        "except SetupError as error: print(json.dumps(error.as_dict()))\n"
    )
    environment = {**os.environ, "TORPOR_HOME": str(folder)}
    command = [*inside, sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    error: dict[str, str] = json.loads(done.stdout)
    return error


def test_without_permission_it_says_who_may(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    paths = Paths(closed / "run", closed / "state", closed / "config.toml")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            provision.provision(paths, lambda _: None)
        except SetupError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        said = answer.read()
    assert "may not be written by this user" in said
    assert "as root" in said


def test_other_systems_are_told_to_bring_their_own(tmp_path: Path) -> None:
    release = tmp_path / "os-release"
    release.write_text('ID=fedora\nPRETTY_NAME="Fedora Linux 42"\n')
    with pytest.raises(SetupError, match="Fedora Linux 42 is not Debian") as refused:
        debian.require_debian(release)
    assert "TORPOR_CRIU" in refused.value.hint
    with pytest.raises(SetupError, match="This system is not Debian"):
        debian.require_debian(tmp_path / "none")
    release.write_text("ID=debian\nVERSION_CODENAME=trixie\n")
    debian.require_debian(release)


def test_a_suite_that_nobody_signed_is_refused(tmp_path: Path) -> None:
    """A mirror of unsigned packages, as a man in the middle would serve it."""
    packages = tmp_path / "mirror" / "dists" / "forky" / "main" / "binary-amd64"
    packages.mkdir(parents=True)
    (packages / "Packages").write_text("")
    (packages.parents[1] / "Release").write_text("Origin: Debian\nSuite: testing\nCodename: forky\nComponents: main\n")
    apt = debian.PrivateApt(tmp_path / "apt", "forky", f"file:{tmp_path}/mirror")
    with pytest.raises(SetupError, match="not signed") as refused:
        apt.update()
    assert "debian-archive-keyring" in refused.value.hint


def test_a_damaged_package_is_fetched_again(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.deb"
    damaged.write_bytes(b"not a package")
    with pytest.raises(SetupError, match=r"damaged\.deb could not be unpacked"):
        debian.unpack([damaged], tmp_path / "prefix")
    assert not damaged.exists()
