"""What ties a tree to others is named, and nothing is touched."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adopt.programs import PYTHON, Program
from tests.installation import Installation, eventually

from torpor.engine import procfs
from torpor.errors import Conflict, NotFound, PreflightRefused, UsageError

Start = Callable[..., Program]
UID = 23456


@pytest.fixture(scope="module")
def agent(shared_agent: Installation) -> Installation:
    return shared_agent


def python(start: Start, source: str, **how: object) -> Program:
    """A program that says when it is as it should be."""
    program = start(
        PYTHON, "-I", "-S", "-c", f"{source}\nprint('up', flush=True)\nimport time\ntime.sleep(1000)", **how
    )
    if how.get("stdout") is None:
        program.printed("up")
    return program


def refused(agent: Installation, program: Program, *patterns: str) -> None:
    """A dry run names it, an adoption is refused with it, and the program runs on as it was."""
    found = agent.client.look_at(program.pid)["objections"]
    assert len(found) == len(patterns), found
    for pattern in patterns:
        assert any(re.search(pattern, sentence) for sentence in found), found
    with pytest.raises(PreflightRefused) as error:
        agent.client.adopt(program.pid)
    assert all(sentence in error.value.message for sentence in found)
    assert program.process.poll() is None
    assert agent.client.sessions() == []


def test_a_terminal_of_another_program(agent: Installation, start: Start) -> None:
    master, slave = pty.openpty()
    program = start("sleep", "1000", stdin=slave, stdout=slave)
    name = os.ttyname(slave)
    os.close(slave)
    refused(agent, program, rf"has the terminal {name} open \(its standard input\).*tmux")
    os.close(master)


def test_a_pipeline(agent: Installation, start: Start) -> None:
    reading, writing = os.pipe()
    program = start("sleep", "1000", stdout=writing)
    os.close(writing)
    refused(agent, program, rf"by a pipe \(its standard output\) with Process .* \({os.getpid()}\)")
    os.close(reading)


def test_an_unfinished_pipeline_whose_other_end_is_closed_is_no_obstacle(agent: Installation, start: Start) -> None:
    reading, writing = os.pipe()
    program = start("sleep", "1000", stdin=reading)
    os.close(reading)
    os.close(writing)
    assert agent.client.look_at(program.pid)["objections"] == []


def test_a_unix_socket_with_a_partner_outside(agent: Installation, start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "bus"))
        listener.listen()
        source = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({str(tmp_path / 'bus')!r})"
        program = python(start, source)
        with contextlib.closing(listener.accept()[0]):
            refused(agent, program, rf"unix socket .* with Process .* \({os.getpid()}\) \(D-Bus, {tmp_path}/bus\)")


def test_a_listening_socket_that_another_process_holds_too(agent: Installation, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = start("sleep", "1000", stdin=listener.fileno())
        refused(agent, program, rf"shares an open socket \(its standard input\) with Process .* \({os.getpid()}\)")


def test_a_child_that_is_no_descendant_any_more(agent: Installation, start: Start) -> None:
    source = """
import os
if not os.fork():
    if not os.fork():
        os.execvp("sleep", ["sleep", "1000"])
    os._exit(0)
os.wait()
"""
    program = python(start, source)
    (orphan,) = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _session(pid) == program.pid][
        1:
    ]
    refused(agent, program, rf"Process sleep \({orphan}\) belongs to it \(same session\)")
    os.kill(orphan, 9)


def test_shared_memory_of_the_node(agent: Installation, start: Start) -> None:
    source = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, 4096, 0o1600)
libc.shmat(segment, None, 0)
libc.shmctl(segment, 0, None)
"""
    refused(agent, python(start, source), "System V shared memory")


def test_a_file_in_shared_memory_that_another_process_uses(agent: Installation, start: Start) -> None:
    path = Path(f"/dev/shm/{agent.home.name}")
    with open(path, "wb"):
        program = python(start, f"f = open({str(path)!r})")
        refused(agent, program, rf"shares {path} with Process .* \({os.getpid()}\)")
    path.unlink()


def test_a_container(agent: Installation, start: Start) -> None:
    refused(agent, start("unshare", "--mount", "--uts", "sleep", "1000"), "another mount and host name namespace")


def test_a_second_user_in_the_tree(agent: Installation, start: Start) -> None:
    program = start("sh", "-c", f"setpriv --reuid={UID} --clear-groups sleep 1000 & wait")
    eventually(lambda: {uid for pid in procfs.tree(program.pid) for uid in procfs.uids(pid)}, lambda seen: UID in seen)
    refused(agent, program, r"Process (setpriv|sleep) .* runs as another user")


def test_what_no_checkpoint_can_hold(agent: Installation, start: Start) -> None:
    source = "import ctypes\nctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))"
    refused(agent, python(start, source), "an io_uring ring")


def test_what_is_no_program(agent: Installation, start: Start) -> None:
    ended = start("true")
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for error, pid in ((NotFound, 4_194_303), (UsageError, 1), (UsageError, ended.pid)):
        with pytest.raises(error):
            agent.client.adopt(pid)


def test_who_works_in_a_deleted_folder(agent: Installation, start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    program = start("sh", "-c", 'cd "$0" && exec sleep 1000', str(folder))
    eventually(lambda: os.readlink(f"/proc/{program.pid}/cwd"), str(folder).__eq__)
    folder.rmdir()
    with pytest.raises(PreflightRefused, match="works in a folder that was deleted"):
        agent.client.adopt(program.pid)


def test_what_is_in_a_session_already(agent: Installation, start: Start) -> None:
    program = start("sh", "-c", "sleep 1000; true")
    session = agent.client.adopt(program.pid, name="mine")
    for pid in session["pids"]:
        with pytest.raises(Conflict, match="belongs to the session mine already"):
            agent.client.adopt(pid)
    agent.client.remove("mine", force=True)
    assert program.process.wait() == -15
    assert agent.client.sessions() == []


def test_what_torpor_itself_runs_below(agent: Installation) -> None:
    assert agent.agent is not None
    with pytest.raises(Conflict, match="Torpor's agent"):
        agent.client.look_at(agent.agent.pid)
    with pytest.raises(Conflict, match="runs below it"):
        agent.client.look_at(os.getpid())


def test_the_command_line(agent: Installation, start: Start) -> None:
    reading, writing = os.pipe()
    tied, free = start("sleep", "1000", stdout=writing), start("sleep", "1001")
    os.close(writing)
    done = agent.torpor("adopt", str(tied.pid), "--dry-run")
    assert (done.returncode, "by a pipe" in done.stdout) == (6, True)
    done = agent.torpor("adopt", str(tied.pid), "--json")
    assert (done.returncode, '"code": "preflight"' in done.stderr) == (6, True)
    done = agent.torpor("adopt", str(free.pid), "--dry-run", "--json")
    assert (done.returncode, '"objections": []' in done.stdout) == (0, True)
    done = agent.torpor("adopt", str(free.pid), "--name", "free", "--label", "team=vision", "--idle-after", "2h")
    assert (done.returncode, done.stdout) == (0, "free\n")
    shown = agent.client.session("free")
    assert (shown["labels"], shown["idle_after"], shown["launch"]["argv"]) == (
        {"team": "vision"},
        7200,
        ["sleep", "1001"],
    )
    assert "until its first hibernation" in agent.torpor("show", "free").stdout
    assert agent.torpor("rm", "--force", "free").returncode == 0
    os.close(reading)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
