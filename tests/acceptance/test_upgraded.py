"""NumPy is upgraded by pip while a session that uses it sleeps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
from tests.installation import Installation, eventually

USER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import numpy
assert numpy.__file__.startswith(sys.argv[1])
matrix = numpy.random.default_rng(1).random((40, 40))
while True:
    values = numpy.linalg.eigvalsh(matrix @ matrix.T)
    print(numpy.__version__, values.sum().round(6), numpy.sort(matrix, axis=None)[:3].round(6).tolist(), flush=True)
    time.sleep(0.1)
"""
NEW = "99.0"


def parts() -> list[Path]:
    """The installed NumPy without its own tests, relative to where it is."""
    home = Path(numpy.__file__).parent.parent
    found = [path for name in ("numpy", "numpy.libs") for path in (home / name).rglob("*") if path.is_file()]
    return [path.relative_to(home) for path in found if not {"tests", "__pycache__"} & set(path.parts)]


def install(site: Path) -> None:
    home = Path(numpy.__file__).parent.parent
    for part in parts():
        (site / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(home / part, site / part)


def newer_wheel(folder: Path) -> Path:
    """A wheel of a NumPy that differs in its version and in every library."""
    home, wheel = Path(numpy.__file__).parent.parent, folder / f"numpy-{NEW}-py3-none-any.whl"
    facts = f"numpy-{NEW}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for part in parts():
            content = (home / part).read_bytes()
            if ".so" in part.name:
                content += b"newer"
            if part == Path("numpy/version.py"):
                content += f"\nversion = __version__ = {NEW!r}\n".encode()
            archive.writestr(str(part), content)
        archive.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: numpy\nVersion: {NEW}\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    return wheel


def upgrade(site: Path, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    subprocess.run([*command, "--upgrade", "--target", str(site), str(wheel)], check=True, env=environment)


def test_a_session_goes_on_with_the_numpy_that_it_had(agent: Installation) -> None:
    site = agent.home / "site-packages"
    install(site)
    agent.run(sys.executable, "-c", USER, str(site), name="user")
    before = eventually(lambda: agent.output("user").splitlines(), lambda lines: len(lines) >= 2)
    agent.operate("user", "hibernate")
    upgrade(site, newer_wheel(agent.home))
    (note,) = lines_after_resume(agent, before)
    assert note.startswith("numpy was upgraded, changed or removed meanwhile; the session goes on with the ")
    for _ in range(2):
        agent.operate("user", "hibernate")
        assert lines_after_resume(agent, before) == []
    fresh = agent.run(sys.executable, "-c", USER, str(site), name="fresh")
    agent.wait_for_output(fresh["id"], NEW)


def lines_after_resume(agent: Installation, before: list[str]) -> list[str]:
    """Resumes it; it prints what it printed before. What its owner is told."""
    here = len(agent.output("user").splitlines())
    result = agent.operate("user", "resume")
    assert set(eventually(lambda: agent.output("user").splitlines()[here:], lambda lines: len(lines) >= 2)) == set(
        before
    )
    notes: list[str] = result["notes"]
    return notes
