"""A session makes the root side open files for it when it comes back: only those that it had open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.agent.test_owners import GID, UID, Somebody
from tests.installation import PYTHON, Installation

SECRET, OWN = "secret" * 10, "my own" * 10

SUBJECT = """
import mmap, os, signal, sys
os.chdir(sys.argv[1])
opened = open("opened", "r+b")
with open("mapped", "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
os.chdir("folder")
def tell(*_):
    opened.seek(0)
    print(opened.read(), mapped[:], os.path.exists("inside"), flush=True)
signal.signal(signal.SIGUSR1, tell)
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def somebody(agent: Installation) -> Somebody:
    return Somebody(agent)


@pytest.fixture
def theirs(agent: Installation) -> Path:
    """A folder of the other user's, and beside it root's secrets, of the same sizes and modes."""
    home, secrets = agent.home / "theirs", agent.home / "secrets"
    (home / "folder").mkdir(parents=True)
    (secrets / "folder").mkdir(parents=True)
    (secrets / "folder" / "inside").touch()
    for folder, content in ((home, OWN), (secrets, SECRET)):
        for name in ("opened", "mapped"):
            (folder / name).write_text(content)
            (folder / name).chmod(0o600)
        (folder / "folder").chmod(0o700)
    secrets.chmod(0o700)
    for path in (home, *home.iterdir()):
        os.chown(path, UID, GID)
    return home


@pytest.mark.parametrize("name", ["opened", "mapped", "folder"])
def test_a_link_laid_where_a_session_had_something_open_is_not_followed(
    agent: Installation, somebody: Somebody, theirs: Path, name: str
) -> None:
    """A file comes back with the bytes that it had; what was a folder cannot, so that resume is refused."""
    session = somebody.start(PYTHON, "-c", SUBJECT, str(theirs))["id"]
    agent.wait_for_output(session, "up")
    assert "code" not in somebody.ask("operation", ref=session, kind="hibernate")
    aside = theirs / "aside"
    (theirs / name).rename(aside)
    (theirs / name).symlink_to(agent.home / "secrets" / name)
    answer = somebody.ask("operation", ref=session, kind="resume")
    if name == "folder":
        assert answer["code"] == "incompatible"
        assert str(theirs / name) in answer["message"]
        assert somebody.ask("session", ref=session)["state"] == "hibernated"
        (theirs / name).unlink()
        aside.rename(theirs / name)
        answer = somebody.ask("operation", ref=session, kind="resume")
    assert "code" not in answer
    somebody.ask("signal", ref=session, signum=10)
    agent.wait_for_output(session, f"{OWN.encode()!r} {OWN.encode()!r} False")
    for secret in ("opened", "mapped"):
        assert (agent.home / "secrets" / secret).read_text() == SECRET
