"""`torpor demo`, for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torpor.demo import notebook

DEMO = [sys.executable, "-m", "torpor", "demo"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the demonstration lives; empty, unmounted and used by no process when the test is over."""
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/var/tmp") as name:
        yield Path(name)
        assert os.listdir(name) == []
        assert name not in Path("/proc/self/mountinfo").read_text()
        assert processes_that_name(name) == {}


def env_in(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}


def processes_that_name(text: str) -> dict[int, bytes]:
    """Command lines of the processes with `text` in their environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or more privileged than anything that was started here
    return found


def test_a_notebook_sleeps_and_wakes_and_computes_the_very_same_losses(folder: Path) -> None:
    ran = subprocess.run(
        [*DEMO, "--json"], env=env_in(folder), capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    figures = report["figures"]
    assert report["ok"]
    assert figures["identical"]
    assert figures["losses"] == figures["losses_expected"]
    assert len(set(figures["losses"])) == 2 * notebook.STEPS
    assert figures["bytes_resident"] > figures["bytes_data"] > 200e6
    assert figures["bytes_stored"] > figures["bytes_data"]
    names = [event["name"] for event in report["timeline"]]
    assert names.index("idle") < names.index("hibernate") < names.index("asleep") < names.index("cell 3")
    assert names[-1] == "clean"


@pytest.mark.parametrize(("after", "number"), [("jupyter lab", signal.SIGINT), ("idle", signal.SIGTERM)])
def test_ended_in_the_middle_it_leaves_nothing_behind(folder: Path, after: str, number: signal.Signals) -> None:
    demo = subprocess.Popen(DEMO, env=env_in(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert demo.stdout is not None
    told = ""
    for line in demo.stdout:
        told += line
        if after in line:
            demo.send_signal(number)
            break
    rest, _ = demo.communicate(timeout=120)
    assert demo.returncode == 128 + number, told + rest
    assert "identical" not in rest


def test_a_hibernation_that_fails_fails_the_demonstration_and_leaves_nothing_behind(
    folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "criu"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && { echo Version: 4.2.1; exit 0; }\necho broken >&2\nexit 1\n")
    broken.chmod(0o755)
    env = {**env_in(folder), "TORPOR_CRIU": str(broken)}
    ran = subprocess.run([*DEMO, "--json"], env=env, capture_output=True, text=True, timeout=250, check=False)
    report = json.loads(ran.stdout)
    assert ran.returncode != 0
    assert not report["ok"]
    assert report["error"]["message"]
