"""`torpor doctor` and `torpor setup --check`, as a person and as a program run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from torpor.engine.criu_binary import Criu
from torpor.errors import SetupError
from torpor.paths import Paths
from torpor.setup import doctor, systemd

from .conftest import FakeCriu

TORPOR = str(Path(sys.executable).with_name("torpor"))


def _torpor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TORPOR, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def environment(provisioned: tuple[Paths, Criu, list[str]], tmp_path: Path) -> dict[str, str]:
    return {"TORPOR_CRIU": str(provisioned[0].criu), "TORPOR_HOME": str(tmp_path / "home")}


def test_doctor_tells_programs_what_is_there(environment: dict[str, str]) -> None:
    done = _torpor("doctor", "--json", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"]
    assert report["node"] == os.uname().nodename
    assert report["criu"]["path"].startswith(environment["TORPOR_CRIU"])
    assert report["criu"]["version"].startswith("4.")
    assert report["criu"]["proved"]
    assert report["agent"]["url"] == f"unix://{environment['TORPOR_HOME']}/run/agent.sock"
    for check in report["checks"]:
        assert {"name", "ok", "found", "cost", "remedy"} <= check.keys()
        assert check["ok"] or (check["cost"] and check["remedy"]), check
    named = {check["name"]: check for check in report["checks"]}
    assert named["criu at work"]["ok"]
    assert not named["agent"]["ok"]
    assert "torpor up" in named["agent"]["remedy"]


def test_doctor_changes_nothing(environment: dict[str, str]) -> None:
    _torpor("doctor", **environment)
    assert not Path(environment["TORPOR_HOME"]).exists()


def test_doctor_tells_people_too(environment: dict[str, str]) -> None:
    done = _torpor("doctor", **environment)
    assert done.returncode == 0
    assert "GPU: none" in done.stdout or "GPU: NVRM" in done.stdout
    assert "saved and restored" in done.stdout


def test_check_proves_the_criu_and_changes_nothing(environment: dict[str, str]) -> None:
    done = _torpor("setup", "--check", "--json", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["criu"]["proved"]
    assert not Path(environment["TORPOR_HOME"]).exists()


def test_check_fails_with_the_reason(environment: dict[str, str], fake_criu: FakeCriu) -> None:
    done = _torpor("setup", "--check", **{**environment, "TORPOR_CRIU": str(fake_criu("4.1.1"))})
    assert done.returncode == SetupError.exit_status
    assert "CRIU 4.1.1 is older than 4.2" in done.stdout
    assert "No session can be saved or resumed." in done.stdout


def test_a_criu_that_does_not_work_is_essential(home: Paths, fake_criu: FakeCriu) -> None:
    report = doctor.examine(home, {"TORPOR_CRIU": str(fake_criu("4.2.1"))})
    failed = [check for check in report.checks if check.essential and not check.ok]
    assert [check.name for check in failed] == ["criu at work"]
    assert not report.ok
    assert not report.criu.proved


def test_notebooks_need_jupyter_client(monkeypatch: pytest.MonkeyPatch, home: Paths, fake_criu: FakeCriu) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    checks = doctor.examine(home, {"TORPOR_CRIU": str(fake_criu("4.2.1"))}).checks
    (found,) = [check for check in checks if check.name == "jupyter_client"]
    assert not found.ok
    assert not found.essential
    assert "torpor[jupyter]" in found.remedy


def test_the_unit_starts_this_program_and_leaves_sessions_alone(tmp_path: Path) -> None:
    unit = systemd.install_unit(Path("/opt/torpor/bin/torpor"), tmp_path)
    lines = unit.read_text().splitlines()
    assert "ExecStart=/opt/torpor/bin/torpor up" in lines
    assert {"KillMode=process", "Delegate=yes", "RuntimeDirectoryPreserve=yes"} <= set(lines)
    assert [entry.name for entry in tmp_path.iterdir()] == ["torpor.service"]


def test_a_machine_without_systemd_is_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="could not be written"):
        systemd.install_unit(Path("/usr/bin/torpor"), tmp_path / "none")
