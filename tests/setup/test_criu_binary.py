"""Which CRIU is used, and which are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.engine import criu_binary
from torpor.engine.criu_binary import Criu, candidates, find_criu, prefix_argv, refusal, require_criu
from torpor.errors import SetupError
from torpor.paths import Paths

from .conftest import FakeCriu


@pytest.fixture(autouse=True)
def _no_shared_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine's own CRIUs are out of sight."""
    nowhere = tmp_path / "nowhere"
    monkeypatch.setattr(criu_binary, "SYSTEM", Paths(nowhere, nowhere, nowhere))
    monkeypatch.setattr(criu_binary, "_SBIN", ())


def test_a_new_system_criu_is_used(home: Paths, fake_criu: FakeCriu) -> None:
    program = fake_criu("4.2.1")
    assert find_criu(home, {"PATH": str(program.parent)}) == Criu((str(program),), (4, 2, 1), "system")


@pytest.mark.parametrize(
    ("version", "reason"),
    [("3.17.1", "cannot start on current kernels"), ("4.1.1", "cannot save a process with a TCP socket")],
)
def test_an_old_criu_is_refused_with_the_reason(home: Paths, fake_criu: FakeCriu, version: str, reason: str) -> None:
    environ = {"PATH": str(fake_criu(version).parent)}
    assert find_criu(home, environ) is None
    with pytest.raises(SetupError, match=reason) as refused:
        require_criu(home, environ)
    assert f"CRIU {version} is older than 4.2" in refused.value.message
    assert "torpor setup" in refused.value.hint


@pytest.mark.parametrize(
    ("version", "usable"), [((4, 2, 0), True), ((5, 0, 0), True), ((4, 1, 9), False), ((2, 0, 0), False)]
)
def test_the_boundary_is_4_2(version: tuple[int, int, int], usable: bool) -> None:
    assert (refusal(version) == "") is usable


def test_no_criu_at_all_says_how_to_get_one(home: Paths) -> None:
    with pytest.raises(SetupError) as missing:
        require_criu(home, {"PATH": ""})
    assert missing.value.hint == criu_binary.HOW_TO_GET


def test_what_the_environment_names_comes_first(home: Paths, fake_criu: FakeCriu) -> None:
    named = fake_criu("4.3", folder="named")
    other = fake_criu("4.2.1", folder="other")
    found = find_criu(home, {"TORPOR_CRIU": str(named), "PATH": str(other.parent)})
    assert found == Criu((str(named),), (4, 3, 0), "TORPOR_CRIU")


@pytest.mark.parametrize("name", ["missing", "empty", "old/criu", "mute/criu"])
def test_what_the_environment_names_is_never_replaced(
    home: Paths, fake_criu: FakeCriu, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    fake_criu("4.1", folder="old")
    fake_criu("nonsense", folder="mute")
    good = fake_criu("4.2.1", folder="good")
    with pytest.raises(SetupError, match="TORPOR_CRIU names"):
        find_criu(home, {"TORPOR_CRIU": str(tmp_path / name), "PATH": str(good.parent)})


def test_a_prefix_without_a_loader_is_no_criu(home: Paths, fake_criu: FakeCriu) -> None:
    program = home.criu / "usr" / "sbin" / "criu"
    program.parent.mkdir(parents=True)
    fake_criu("4.2.1").rename(program)
    assert prefix_argv(home.criu) is None
    (found,) = candidates(home, {"PATH": ""})
    assert found.refusal == "the folder holds no complete CRIU."


def test_a_replaced_program_is_asked_again(home: Paths, fake_criu: FakeCriu) -> None:
    program = fake_criu("4.1")
    assert find_criu(home, {"PATH": str(program.parent)}) is None
    fake_criu("4.2.1")
    assert find_criu(home, {"PATH": str(program.parent)}) is not None
