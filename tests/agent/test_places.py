"""What CRIU, as root, makes again when a session comes back: never where its user could not, whatever was exchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent.people import GID, UID, Somebody
from tests.installation import PYTHON, Installation

SUBJECT = """
import os, signal, socket, sys
place, made = sys.argv[1:3]
def bound():
    held = socket.socket(socket.AF_UNIX)
    held.bind(place + "/it")
    held.listen()
    return held
def opened():
    return open(place + "/it", "w+")
def another_name():
    held = open(place + "/first", "w+")
    os.link(place + "/first", place + "/it")
    os.unlink(place + "/first")
    return held
def deleted(held):
    os.unlink(place + "/it")
    return held
def folder():
    os.mkdir(place + "/it")
    os.chdir(place + "/it")
    os.rmdir(place + "/it")
def pipe():
    os.mkfifo(place + "/it")
    return os.open(place + "/it", os.O_RDWR)
held = eval(made)
def tell(*_):
    print("woken", held.getsockname() if "bound" in made else "", os.readlink("/proc/self/exe"), flush=True)
    print(open(sys.argv[3]).read(), flush=True)
signal.signal(signal.SIGUSR1, tell)
print("up", flush=True)
while True:
    signal.pause()
"""

KINDS = [
    "bound()",
    "deleted(bound())",
    "deleted(opened())",
    "another_name()",
    "folder()",
    "deleted(pipe())",
]


EXCHANGE = """
import ctypes, signal, sys
libc, ends = ctypes.CDLL(None), []
signal.signal(signal.SIGTERM, lambda *_: ends.append(1))
first, second = (one.encode() for one in sys.argv[1:])
times = 0
while not ends or times % 2:
    assert libc.renameat2(-100, first, -100, second, 2) == 0
    times += 1
"""


@pytest.fixture
def somebody(agent: Installation) -> Somebody:
    return Somebody(agent)


@pytest.fixture
def home(agent: Installation) -> Path:
    folder = agent.home / "theirs"
    folder.mkdir()
    (folder / "place").mkdir()
    (folder / "text").write_text("through a link")
    (folder / "link").symlink_to("text")
    for path in (folder, *folder.iterdir()):
        os.chown(path, UID, GID, follow_symlinks=False)
    return folder


def start(agent: Installation, somebody: Somebody, home: Path, made: str, place: str = "place") -> str:
    session = somebody.start(PYTHON, "-c", SUBJECT, str(home / place), made, str(home / "link"))
    agent.wait_for_output(session["id"], "up")
    return str(session["id"])


def facts(folder: Path) -> list[tuple[str, int, int, int, bytes]]:
    entries = [(one.name, one.lstat(), one.read_bytes() if one.is_file() else b"") for one in folder.iterdir()]
    return sorted((name, seen.st_uid, seen.st_mode, seen.st_ctime_ns, content) for name, seen, content in entries)


@pytest.mark.parametrize("made", KINDS)
def test_it_comes_back_in_its_own_place_and_follows_links_as_before(
    agent: Installation, somebody: Somebody, home: Path, made: str
) -> None:
    session = start(agent, somebody, home, made)
    for _ in range(2):
        for kind in ("hibernate", "resume"):
            *_, last = somebody.ask("operation", ref=session, kind=kind)
            assert last["event"] == "result"
    somebody.ask("signal", ref=session, signum=10)
    assert "woken" in agent.wait_for_output(session, "through a link")
    init = somebody.ask("session", ref=session)["pids"][0]
    assert "nosymfollow" not in Path(f"/proc/{init}/mountinfo").read_text()


@pytest.mark.parametrize("made", KINDS)
@pytest.mark.parametrize("taken", ["file", "socket", "nothing"])
def test_nothing_is_made_through_a_link_laid_meanwhile(
    agent: Installation, somebody: Somebody, home: Path, made: str, taken: str
) -> None:
    session = start(agent, somebody, home, made)
    assert "code" not in somebody.ask("operation", ref=session, kind="hibernate")
    secret = agent.home / "secret"
    secret.mkdir(mode=0o700)
    if taken == "file":
        (secret / "it").write_text("precious")
    elif taken == "socket":
        os.mknod(secret / "it", 0o140600)
    before, stamp = facts(secret), secret.stat().st_mtime_ns
    (home / "place").rename(home / "aside")
    (home / "place").symlink_to(secret)
    refused = somebody.ask("operation", ref=session, kind="resume")
    assert refused["code"] in ("incompatible", "engine")
    assert (facts(secret), secret.stat().st_mtime_ns) == (before, stamp)
    assert somebody.ask("session", ref=session)["state"] == "hibernated"

    (home / "place").unlink()
    (home / "aside").rename(home / "place")
    assert "code" not in somebody.ask("operation", ref=session, kind="resume")
    somebody.ask("signal", ref=session, signum=10)
    agent.wait_for_output(session, "through a link")


@pytest.mark.parametrize("made", KINDS)
def test_nothing_is_made_through_a_link_that_comes_and_goes_while_it_is_resumed(
    agent: Installation, somebody: Somebody, home: Path, made: str
) -> None:
    session = start(agent, somebody, home, made)
    secret = agent.home / "secret"
    secret.mkdir(mode=0o700)
    before, stamp = facts(secret), secret.stat().st_mtime_ns
    (home / "other").symlink_to(secret)
    for _ in range(4):
        if somebody.ask("session", ref=session)["state"] == "running":
            assert "code" not in somebody.ask("operation", ref=session, kind="hibernate")
        with subprocess.Popen([sys.executable, "-c", EXCHANGE, str(home / "place"), str(home / "other")]) as rival:
            somebody.ask("operation", ref=session, kind="resume")
            rival.terminate()
        assert (facts(secret), secret.stat().st_mtime_ns) == (before, stamp)
    assert (home / "place").is_symlink() != (home / "other").is_symlink()


def test_nothing_is_left_through_a_link_that_comes_and_goes_while_it_is_saved(
    agent: Installation, somebody: Somebody, home: Path
) -> None:
    session = start(agent, somebody, home, "another_name()")
    secret = agent.home / "secret"
    secret.mkdir(mode=0o700)
    (home / "other").symlink_to(secret)
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", EXCHANGE, str(home / "place"), str(home / "other")]) as rival:
            somebody.ask("operation", ref=session, kind="hibernate")
            rival.terminate()
        assert list(secret.iterdir()) == []
        if somebody.ask("session", ref=session)["state"] == "hibernated":
            resume(somebody, session, home)


def resume(somebody: Somebody, session: str, home: Path) -> None:
    """The folder may have had either name when the session was saved."""
    if "code" in somebody.ask("operation", ref=session, kind="resume"):
        (home / "place").rename(home / "third")
        (home / "other").rename(home / "place")
        (home / "third").rename(home / "other")
        assert "code" not in somebody.ask("operation", ref=session, kind="resume")


def test_a_deleted_working_folder_takes_over_nothing_that_is_at_its_name(
    agent: Installation, somebody: Somebody, home: Path
) -> None:
    session = start(agent, somebody, home, "folder()")
    assert "code" not in somebody.ask("operation", ref=session, kind="hibernate")
    (home / "place" / "it").write_text("root's")
    (home / "place" / "it").chmod(0o600)
    before = facts(home / "place")
    refused = somebody.ask("operation", ref=session, kind="resume")
    assert refused["code"] == "incompatible"
    assert f"there is another {home / 'place' / 'it'} now" in refused["message"]
    assert facts(home / "place") == before
    (home / "place" / "it").unlink()
    assert "code" not in somebody.ask("operation", ref=session, kind="resume")


def test_a_socket_bound_through_a_link_of_the_users_own_comes_back_where_that_leads(
    agent: Installation, somebody: Somebody, home: Path
) -> None:
    (home / "way").symlink_to("place")
    session = start(agent, somebody, home, "bound()", place="way")
    assert "code" not in somebody.ask("operation", ref=session, kind="hibernate")
    assert "code" not in somebody.ask("operation", ref=session, kind="resume")
    somebody.ask("signal", ref=session, signum=10)
    assert f"woken {home / 'place' / 'it'}" in agent.wait_for_output(session, "through a link")

    assert "code" not in somebody.ask("operation", ref=session, kind="hibernate")
    secret = agent.home / "secret"
    secret.mkdir(mode=0o755)
    (home / "place").rename(home / "aside")
    (home / "place").symlink_to(secret)
    refused = somebody.ask("operation", ref=session, kind="resume")
    assert refused["code"] == "incompatible"
    assert f"would be made at {secret / 'it'} now, and cannot be" in refused["message"]
    assert list(secret.iterdir()) == []


def test_a_socket_whose_name_cannot_be_found_is_refused_before_anything_is_touched(
    agent: Installation, somebody: Somebody, home: Path
) -> None:
    """Only where root lacks a capability; elsewhere it is saved like any other."""
    code = (
        "import os, signal, socket, sys\n"
        "os.chdir(sys.argv[1]); held = socket.socket(socket.AF_UNIX); held.bind('near'); os.chdir('/')\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    session = somebody.start(PYTHON, "-c", code, str(home))
    agent.wait_for_output(session["id"], "up")
    answer = somebody.ask("operation", ref=session["id"], kind="hibernate")
    if "code" in answer:
        assert answer["code"] == "preflight"
        assert "has a socket bound to near, which CRIU does not find from its folder" in answer["message"]
        assert somebody.ask("session", ref=session["id"])["pids"] == session["pids"]
    else:
        assert "code" not in somebody.ask("operation", ref=session["id"], kind="resume")
