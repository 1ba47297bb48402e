"""What other users can see of an installation's files and processes: neither names nor sizes, keys or words."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.agent.people import GID, UID, Somebody
from tests.installation import PYTHON, Installation, eventually

from torpor.agent import folders

OTHER_UID = 54361
SOCKETS = {"agent.sock", "attach.sock"}

LOOK = """
import json, os, sys
seen = {"listed": [], "read": [], "known": [], "proc": []}
for path in json.loads(sys.argv[1]):
    try:
        os.listdir(path) if os.path.isdir(path) else os.close(os.open(path, os.O_RDONLY))
        seen["read"].append(path)
    except OSError:
        pass
    try:
        os.stat(path)
        seen["known"].append(path)
    except OSError:
        pass
for pid in json.loads(sys.argv[2]):
    for name in ("environ", "maps", "mem", "fd", "root/", "cwd/", "map_files", "io", "stack", "syscall"):
        path = f"/proc/{pid}/{name}"
        try:
            found = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
            if found:
                seen["proc"].append(path)
        except OSError:
            pass
    try:
        os.kill(pid, 0)
        seen["proc"].append(f"signal {pid}")
    except PermissionError:
        pass
print(json.dumps(seen))
"""


def test_nobody_sees_names_sizes_or_processes_of_others(make_installation: Callable[[], Installation]) -> None:
    agent = make_installation()
    agent.start(TORPOR_PAUSE_AFTER="hibernate:commit")
    somebody, other = Somebody(agent), Somebody(agent, OTHER_UID, ())
    sessions = [somebody.start("sleep", "1000", io=io) for io in ("detached", "streams", "terminal")]
    for session in sessions:
        agent.operate(session["id"], "checkpoint")
    with somebody.start_operation(sessions[0]["id"], "hibernate") as hibernation, agent.keeper() as keeper:
        (worker,) = eventually(keeper.workers, lambda workers: len(workers) == 1)
        eventually(lambda: [*agent.paths.store.rglob("manifests/*/*")], lambda found: len(found) == 4)
        paths = [agent.paths.state, *agent.paths.state.rglob("*"), *agent.paths.run.rglob("*")]
        pids = [keeper.pid(), worker.pid, *(pid for one in sessions[1:] for pid in one["pids"])]
        done = other.run(PYTHON, "-S", "-c", LOOK, json.dumps([str(path) for path in paths]), json.dumps(pids))
        os.kill(worker.pid, signal.SIGUSR1)
        hibernation.communicate()
    seen = json.loads(done.stdout)
    assert seen["read"] == []
    assert seen["proc"] == []
    reachable = {agent.paths.state, agent.paths.state / "sessions"}
    open_folders = {path for path in map(Path, seen["known"]) if path.is_dir()}
    assert open_folders - {agent.paths.session(one["id"]) for one in sessions} - reachable <= {
        agent.paths.site_key.parent,
        agent.paths.store,
        agent.paths.logs,
        agent.paths.scratch,
        agent.paths.database.parent,
        agent.paths.state / "pins",
    }
    of_sessions = {"exit", "out.log", "err.log"}  # whoever guessed 48 random bits would see their size
    known = {path.name for path in map(Path, seen["known"]) if not path.is_dir()}
    assert known - of_sessions <= SOCKETS | {"keeper.sock", "agent.lock", "keeper.lock"}


def test_no_command_line_or_message_names_a_key(agent: Installation) -> None:
    somebody = Somebody(agent)
    session = somebody.ask(
        "create_session", argv=["sleep", "1000"], cwd="/", env={"PATH": "/bin", "TOKEN": "my-secret"}
    )
    somebody.ask("operation", ref=session["id"], kind="checkpoint")
    key = agent.paths.site_key.read_bytes().hex()
    with agent.keeper() as keeper:
        pids = [keeper.pid(), *session["pids"]]
    assert agent.agent is not None
    for pid in (agent.agent.pid, *pids):
        words = Path(f"/proc/{pid}/cmdline").read_text()
        assert "my-secret" not in words
        assert key not in words
    assert "my-secret" not in agent.log


def test_modes_are_corrected_at_the_next_start(agent: Installation) -> None:
    agent.stop()
    private = [agent.paths.logs, agent.paths.scratch, agent.paths.database.parent, agent.paths.site_key.parent]
    for folder in (*private, agent.paths.state):
        folder.chmod(0o777)
    agent.start()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in private} == {0o700}
    assert stat.S_IMODE(agent.paths.state.stat().st_mode) == 0o711


def test_the_registry_of_an_earlier_version_is_moved(agent: Installation) -> None:
    session = agent.run("sleep", "1000", name="kept")
    agent.stop()
    agent.paths.database.rename(agent.paths.state / "torpor.db")
    agent.start()
    assert agent.client.session("kept")["id"] == session["id"]
    assert not (agent.paths.state / "torpor.db").exists()


def test_a_registry_in_use_is_not_moved(tmp_path: Path) -> None:
    earlier, now = tmp_path / "torpor.db", tmp_path / "registry" / "torpor.db"
    now.parent.mkdir()
    user = sqlite3.connect(earlier)
    user.execute("PRAGMA journal_mode=WAL")
    user.execute("CREATE TABLE t (x)")
    with pytest.raises(folders.Conflict):
        folders.move_registry(earlier, now)
    user.close()
    folders.move_registry(earlier, now)
    assert now.exists()


def test_a_file_that_replaces_a_log_is_not_followed(agent: Installation) -> None:
    """The folder is root's: the session's user can change what is in the files, and not what they are."""
    somebody = Somebody(agent)
    session = somebody.start("sleep", "1000")
    folder = Path(session["folder"])
    for command in (("rm", "-f"), ("ln", "-sf", "/etc/shadow"), ("mv", "/dev/null")):
        assert somebody.run(*command, str(folder / "out.log")).returncode != 0
    assert (folder / "out.log").lstat().st_uid == UID
    assert folder.stat().st_gid != GID
