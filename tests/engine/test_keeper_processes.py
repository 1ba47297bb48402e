"""The keeper as parent, and what happens to sessions and workers when it dies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.engine.stage import PATIENCE, PYTHON, Stage, eventually, exit_status, me, open_pidfd, user

from torpor.engine import procfs
from torpor.engine.keeper_client import Events, KeeperClient, ensure_keeper, open_stdin
from torpor.errors import EngineError, SetupError
from torpor.model import InputOutput, Launch
from torpor.paths import Paths

ORPHANS = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.wait()
print("ready", flush=True)
time.sleep(1000)
"""
SAYS_SIGNALS = """
import signal
heard = [getattr(signal, "SIG" + name) for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT")]
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("ready", flush=True)
while True: print(signal.Signals(signal.sigwait(heard)).name, flush=True)
"""


@pytest.mark.parametrize("io", [InputOutput.DETACHED, InputOutput.TERMINAL])
def test_signals_reach_the_main_command(stage: Stage, io: InputOutput) -> None:
    stage.python(SAYS_SIGNALS, io=io, caller=user())
    stage.wait_for_output("ready")
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"):
        stage.keeper.signal("a", getattr(signal, f"SIG{name}"))
        stage.wait_for_output(f"SIG{name}")


def test_a_signal_reaches_the_whole_process_group(stage: Stage) -> None:
    stage.launch("sh", "-c", "trap 'echo shell; exit 9' TERM; sleep 1000; exit 1")
    eventually(lambda: len(procfs.tree(stage.launched["a"].pid)) == 3)
    stage.keeper.signal("a", signal.SIGTERM)
    assert stage.wait_for_exit() == 9  # not after a thousand seconds: sleep was told too


def test_orphans_inside_a_session_are_reaped_by_its_first_process(stage: Stage) -> None:
    made = stage.python(ORPHANS)
    stage.wait_for_output("ready")
    eventually(lambda: children_of(made.pid), lambda found: len(found) == 1)


def test_everything_of_a_session_ends_with_its_main_command(stage: Stage) -> None:
    made = stage.launch("sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & sleep 0.3; exit 2")
    tree = eventually(lambda: procfs.tree(made.pid), lambda found: len(found) >= 4)
    with contextlib.ExitStack() as stack:
        pidfds = [stack.enter_context(open_pidfd(pid)) for pid in tree]
        assert stage.wait_for_exit() == 2
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], PATIENCE)[0]


def test_orphans_that_nobody_knows_are_reaped_and_never_killed(stage: Stage) -> None:
    mark = stage.home / "mark"
    read, write = os.pipe()
    nothing = os.open("/dev/null", os.O_RDWR)
    argv = ["/bin/sh", "-c", f"(echo $$ >&2; until [ -e {mark} ]; do sleep 0.02; done; echo went on) & exit 3"]
    stage.keeper.spawn("w", argv, {"PATH": "/usr/bin:/bin"}, nothing, write, nothing)
    os.close(write)
    os.close(nothing)
    keeper = stage.keeper.pid()
    orphans = eventually(lambda: [pid for pid in children_of(keeper) if procfs.start_time(pid)])
    mark.touch()
    with os.fdopen(read) as said:
        assert said.read() == "went on\n"
    eventually(lambda: not set(orphans) & set(children_of(keeper)))


def test_a_workers_end_is_announced(stage: Stage) -> None:
    nothing = os.open("/dev/null", os.O_RDWR)
    with contextlib.closing(Events(stage.paths)) as events:
        pid, start_time = stage.keeper.spawn(
            "w1", ["/bin/sh", "-c", "read line; exit 4"], {}, nothing, nothing, nothing
        )
        assert next(iter(events)) == {"event": "worker_exit", "name": "w1", "pid": pid, "status": 4}
    os.close(nothing)
    assert start_time > 0
    assert stage.keeper.workers() == []


def test_a_worker_has_its_own_session_and_only_the_descriptors_given(stage: Stage) -> None:
    read, write = os.pipe()
    nothing = os.open("/dev/null", os.O_RDWR)
    program = (
        "import os; print(os.getsid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd')), dict(os.environ)['A'])"
    )
    stage.keeper.spawn("w", [PYTHON, "-I", "-S", "-c", program], {"A": "1"}, nothing, write, nothing)
    os.close(write)
    os.close(nothing)
    with os.fdopen(read) as said:
        assert said.read() == "True ['0', '1', '2', '3'] 1\n"


def test_a_worker_that_cannot_be_executed_is_an_error(stage: Stage) -> None:
    nothing = os.open("/dev/null", os.O_RDWR)
    with pytest.raises(EngineError, match="No such file"):
        stage.keeper.spawn("w", ["/no/such"], {}, nothing, nothing, nothing)
    os.close(nothing)


def test_any_number_of_starters_get_the_same_keeper(stage: Stage) -> None:
    stage.kill_keeper()
    program = (
        "import sys; from pathlib import Path; from torpor.paths import Paths; from torpor.engine import keeper_client;"
        "h = Path(sys.argv[1]); p = Paths(h / 'run', h / 'state', h / 'c'); print(keeper_client.ensure_keeper(p).pid())"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(stage.home)]
    starters = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(5)]
    pids = {starter.communicate()[0] for starter in starters}
    assert len(pids) == 1
    stage.start_keeper()
    assert {b"%d\n" % stage.keeper.pid()} == pids


def test_the_keeper_is_a_daemon_of_its_own(stage: Stage) -> None:
    pid = stage.keeper.pid()
    assert os.getsid(pid) not in (os.getsid(0), pid)
    assert pid not in procfs.tree(os.getpid())
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert procfs.rss_bytes([pid]) < 32 << 20


def test_a_keeper_with_sessions_ends_only_when_forced(stage: Stage) -> None:
    made = stage.launch("sleep", "1000")
    with pytest.raises(EngineError, match="still holds sessions"):
        stage.keeper.stop()
    stage.keeper.kill("a")
    stage.wait_for_exit()
    assert not procfs.tree(made.pid)
    stage.keeper.stop()


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    home = tmp_path / ("x" * 100)
    with pytest.raises(SetupError, match="too long"):
        ensure_keeper(Paths(run=home, state=home, config=home))


def test_sessions_go_on_without_a_keeper_and_the_next_one_knows_them(stage: Stage) -> None:
    bash = stage.launch("bash", "--norc", "-i", io=InputOutput.TERMINAL, env={"PATH": os.environ["PATH"], "PS1": "$ "})
    cat = stage.launch("cat", session="b", io=InputOutput.STREAMS)
    stdin = open_stdin(stage.paths.attach_socket, "b")
    quick = stage.launch("sh", "-c", f"until [ -e {stage.home}/mark ]; do sleep 0.02; done; exit 8", session="c")
    with stage.attach() as client:
        client.type(b"X=41\n")
        client.read_until(b"X=41")
    held = {session: stage.keeper.take_fds(session) for session in "abc"}
    assert [sorted(fds) for fds in held.values()] == [["terminal"], ["stdin"], []]

    stage.kill_keeper()
    (stage.home / "mark").touch()
    eventually(lambda: not procfs.alive(quick.pid, quick.start_time, procfs.boot_id()))
    assert exit_status(stage, "c") == 8
    for made in (bash, cat):
        assert procfs.alive(made.pid, made.start_time, procfs.boot_id())

    stage.start_keeper()
    assert stage.keeper.sessions() == []
    for session, made in stage.launched.items():
        stage.keeper.adopt(session, made.pid, made.start_time, held[session])
        for fd in held[session].values():
            os.close(fd)
    assert stage.wait_for_exit("c") == 8
    assert [one.name for one in stage.keeper.sessions()] == ["a", "b"]
    with stage.attach() as client:
        client.type(b"echo $((X+1))\n")
        client.read_until(b"42\r\n")
        client.type(b"exit 3\n")
        client.read_to_end()
        assert client.status == "3"
    os.write(stdin, b"still read\n")
    os.close(stdin)
    assert stage.wait_for_exit("b") == 0
    assert stage.output("b") == "still read\n"


def test_the_kernel_tells_the_status_of_a_killed_session_that_was_adopted(stage: Stage) -> None:
    made = stage.launch("sleep", "1000")
    stage.kill_keeper()
    stage.start_keeper()
    stage.keeper.adopt("a", made.pid, made.start_time)
    stage.keeper.kill("a")
    assert stage.wait_for_exit() == 128 + signal.SIGKILL
    assert exit_status(stage) is None


def test_a_process_that_only_has_the_same_pid_is_not_adopted(stage: Stage) -> None:
    made = stage.launch("sleep", "1000")
    stage.kill_keeper()
    stage.start_keeper()
    with contextlib.closing(Events(stage.paths)) as events:
        stage.keeper.adopt("a", made.pid, made.start_time + 1)
        assert next(iter(events)) == {"event": "exit", "session": "a", "status": None}
    assert stage.keeper.sessions() == []
    assert procfs.alive(made.pid, made.start_time, procfs.boot_id())


def test_a_running_session_is_not_exchanged_for_another_process(stage: Stage) -> None:
    stage.launch("sleep", "1000")
    other = stage.launch("sleep", "1000", session="b")
    with pytest.raises(EngineError, match="runs already"):
        stage.keeper.adopt("a", other.pid, other.start_time)


def test_requests_that_make_no_sense_are_refused_in_words(stage: Stage) -> None:
    for request, said in (
        ({"do": "nothing"}, "No such request"),
        ({"do": "signal", "session": "a"}, "holds no session"),
        ({"do": "launch"}, "'session' is missing"),
        ({"do": "launch", "session": "a"}, "pop from empty list"),
        ({"do": "adopt", "session": "a", "pid": "x", "start_time": 1}, "invalid literal"),
        ({"do": "away", "session": "a", "away": True}, "No such file"),
    ):
        with pytest.raises(EngineError, match=said):
            stage.keeper.request(**request)


def test_nothing_is_left_of_sessions_that_were_forgotten(stage: Stage) -> None:
    keeper = stage.keeper.pid()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{keeper}/fd"))

    def one_of_each() -> None:
        for session, io in zip("abc", InputOutput, strict=True):
            stage.launch("true", session=session, io=io)
            stage.wait_for_exit(session)
            stage.keeper.forget(session)
        with pytest.raises(EngineError):
            stage.launch("true", session="d", cwd="/nowhere", io=InputOutput.TERMINAL)

    one_of_each()
    before = eventually(descriptors, lambda found: found == descriptors())
    for _ in range(5):
        one_of_each()
    eventually(lambda: descriptors() <= before)
    eventually(lambda: children_of(keeper) == [])


def test_many_sessions_at_once(stage: Stage) -> None:
    def start(number: int) -> None:
        with contextlib.closing(KeeperClient(stage.paths)) as keeper:
            launch = Launch(argv=("sh", "-c", f"exit {number}"), cwd="/", env={"PATH": os.environ["PATH"]})
            keeper.launch(f"m-{number}", stage.folder(f"m-{number}"), launch, me())

    threads = [threading.Thread(target=start, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(12):
        assert stage.wait_for_exit(f"m-{number}") == number


def children_of(pid: int) -> list[int]:
    listed = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in os.listdir(f"/proc/{pid}/task")]
    return [int(child) for children in listed for child in children.split()]
