"""Files that a session's user named and laid so that the root side stumbles: kept as they are, or refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.agent.people import GID, UID, Somebody
from tests.installation import PYTHON, Installation

SUBJECT = """
import os, signal, socket, stat, sys
exec(sys.argv[1])
def seen(folder):
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        facts = os.lstat(path)
        content = ""
        if stat.S_ISLNK(facts.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(facts.st_mode):
            with open(path, "rb") as file:
                content = file.read(100)
        yield path, oct(facts.st_mode), facts.st_uid, facts.st_size * stat.S_ISREG(facts.st_mode), content
        if stat.S_ISDIR(facts.st_mode):
            yield from seen(path)
def tell(*_):
    print("told", list(seen(b"/dev/shm")), flush=True)
signal.signal(signal.SIGUSR1, tell)
print("up", flush=True)
while True:
    signal.pause()
"""

KEPT = {
    "names that are no text": r"open(b'/dev/shm/\xff\n\x1b[2J', 'w').write('content')",
    "folders that are no text": r"os.mkdir(b'/dev/shm/\xff'); open(b'/dev/shm/\xff/x', 'w').write('content')",
    "links out": r"os.symlink('/etc/shadow', '/dev/shm/a'); os.symlink(b'/\xff', '/dev/shm/b')",
    "another name": r"open(b'/dev/shm/\xff', 'w').write('content'); os.link(b'/dev/shm/\xff', '/dev/shm/z')",
    "a size that fits nowhere": "os.truncate(os.open('/dev/shm/s', os.O_RDWR | os.O_CREAT), 1 << 62)",
    "set-user-id": "os.fchmod(os.open('/dev/shm/s', os.O_RDWR | os.O_CREAT), 0o6755)",
    "a deleted file, and a link at its folder": (
        "os.mkdir('/dev/shm/d'); k = open('/dev/shm/d/k', 'w+'); os.unlink('/dev/shm/d/k')\n"
        "os.rename('/dev/shm/d', '/dev/shm/e'); os.symlink('/etc', '/dev/shm/d')"
    ),
}

REFUSED = {
    "deep folders": "os.chdir('/dev/shm')\nfor _ in range(1500):\n os.mkdir('d'); os.chdir('d')\nos.chdir('/')",
    "long names": "os.chdir('/dev/shm')\nfor _ in range(40):\n os.mkdir('d' * 200); os.chdir('d' * 200)\nos.chdir('/')",
    "a socket, and a link at its folder": (
        "os.mkdir('/dev/shm/d'); k = socket.socket(socket.AF_UNIX); k.bind('/dev/shm/d/passwd')\n"
        "os.rename('/dev/shm/d', '/dev/shm/e'); os.symlink('/etc', '/dev/shm/d')"
    ),
}


@pytest.fixture
def somebody(agent: Installation) -> Somebody:
    return Somebody(agent)


def start(agent: Installation, somebody: Somebody, made: str) -> str:
    session = somebody.start(PYTHON, "-c", SUBJECT, made)["id"]
    agent.wait_for_output(session, "up")
    return str(session)


@pytest.mark.parametrize("made", KEPT.values(), ids=KEPT)
def test_the_sessions_own_memory_files_come_back_as_they_were(
    agent: Installation, somebody: Somebody, made: str
) -> None:
    session = start(agent, somebody, made)
    for _ in range(2):
        somebody.ask("signal", ref=session, signum=10)
        agent.wait_for_output(session, "told")
        for kind in ("hibernate", "resume"):
            assert "code" not in somebody.ask("operation", ref=session, kind=kind)
    somebody.ask("signal", ref=session, signum=10)
    *_, first, second, third = agent.wait_for_output(session, "told").splitlines()[-3:]
    assert first == second == third


@pytest.mark.parametrize("made", REFUSED.values(), ids=REFUSED)
def test_what_could_not_come_back_is_refused_before_it_is_ended(
    agent: Installation, somebody: Somebody, made: str
) -> None:
    etc = os.stat("/etc").st_mtime_ns
    session = start(agent, somebody, made)
    refused = somebody.ask("operation", ref=session, kind="hibernate")
    assert refused["code"] == "preflight"
    assert somebody.ask("session", ref=session)["state"] == "running"
    somebody.ask("signal", ref=session, signum=10)
    assert "code" not in somebody.ask("end", ref=session, keep=False)
    assert os.stat("/etc").st_mtime_ns == etc


def test_a_file_that_is_called_deleted_is_looked_at_like_any_other(agent: Installation, somebody: Somebody) -> None:
    home = agent.home / "theirs"
    home.mkdir()
    file = home / "log (deleted)"
    file.write_text("my own")
    secret = agent.home / "secret"
    secret.write_text("secret")
    for path in (home, file):
        os.chown(path, UID, GID)
    session = start(agent, somebody, f"k = open({str(file)!r}, 'r+')")
    assert "code" not in somebody.ask("operation", ref=session, kind="hibernate")
    aside = file.rename(home / "aside")
    os.link(secret, file)  # by somebody who may, where the kernel does not forbid it to them
    answer = somebody.ask("operation", ref=session, kind="resume")
    assert "code" in answer or opened(agent, session) != secret.stat().st_ino
    assert secret.read_text() == "secret"
    assert aside.read_text() == "my own"


def opened(agent: Installation, session: str) -> int:
    """What the session has under the number that `open` gave it."""
    *_, command = agent.client.session(session)["pids"]
    return Path(f"/proc/{command}/fd/3").stat().st_ino
