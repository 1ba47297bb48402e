"""The proof of a CRIU: it holds, it fails with CRIU's own words, it ends at its deadline, and it leaves nothing."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torpor.engine.criu_binary import Criu
from torpor.errors import SetupError
from torpor.paths import Paths
from torpor.setup import proof

from .conftest import FakeCriu


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    deadline = time.monotonic() + 10
    while left := _processes_naming(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _processes_naming(text: str) -> list[str]:
    commands = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                commands.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # it ended meanwhile
    return [command for command in commands if text in command]


def test_a_criu_that_works_is_proved(provisioned: tuple[Paths, Criu, list[str]]) -> None:
    assert proof.prove(provisioned[1]) > 0


def test_a_criu_that_refuses_is_quoted(fake_criu: FakeCriu) -> None:
    program = fake_criu("4.2.1", 'echo "Error (criu/cr-dump.c:1): The moon is full" >&2; exit 3')
    with pytest.raises(SetupError, match="The moon is full") as failed:
        proof.prove(Criu((str(program),), (4, 2, 1), "system"))
    assert "Nothing was left running" in failed.value.safe


@pytest.mark.parametrize("stuck", ["dump", "restore"])
def test_a_criu_that_hangs_is_ended_at_the_deadline(
    fake_criu: FakeCriu, provisioned: tuple[Paths, Criu, list[str]], stuck: str
) -> None:
    real = shlex.join(provisioned[1].argv)
    program = fake_criu("4.2.1", f'{real} "$@"\nstatus=$?\n[ "$1" = {stuck} ] && sleep 1000\nexit $status')
    with pytest.raises(SetupError, match="had not finished after 3 s"):
        proof.prove(Criu((str(program),), (4, 2, 1), "system"), deadline=3)


def test_a_criu_that_restores_nothing_is_found_out(
    fake_criu: FakeCriu, provisioned: tuple[Paths, Criu, list[str]]
) -> None:
    real = shlex.join(provisioned[1].argv)
    program = fake_criu("4.2.1", f'[ "$1" = restore ] && exit 0\nexec {real} "$@"')
    with pytest.raises(SetupError, match="does not answer on its TCP port"):
        proof.prove(Criu((str(program),), (4, 2, 1), "system"))
