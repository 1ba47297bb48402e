"""Terminals: what a client types reaches the session, what the session prints reaches the log and every client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from typing import Any

import pytest
from tests.engine.stage import PATIENCE, PYTHON, USER, Attached, Stage, eventually, exit_status, in_foreground, user

from torpor.engine.keeper_client import Events, open_stdin
from torpor.errors import EngineError
from torpor.model import InputOutput

BASH_ENV = {"PATH": os.environ["PATH"], "PS1": "$ ", "TERM": "dumb"}
ON_RESIZE = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print("ready", *reversed(os.get_terminal_size()), flush=True)
while signal.sigwait([signal.SIGWINCH]):
    print("now", *reversed(os.get_terminal_size()), flush=True)
"""


def start_bash(stage: Stage, **facts: Any) -> None:
    stage.launch("bash", "--norc", "--noediting", "-i", io=InputOutput.TERMINAL, env=BASH_ENV, **facts)


def test_a_shell_has_job_control_and_its_own_terminal(stage: Stage) -> None:
    start_bash(stage, rows=33, columns=101, caller=user())
    path = stage.launched["a"].terminal
    with stage.attach() as client:
        assert client.answer["ok"]
        client.type(b"stty size; tty; ls -ln $(tty)\n")
        seen = client.read_until(f" {path}\r\n".encode()).decode()
        assert "33 101\r\n" in seen
        assert f"crw------- 1 {USER} " in seen
        client.type(b"cat\n")
        eventually(lambda: in_foreground(stage.launched["a"].pid, "cat"))
        client.type(b"\x1a")
        client.read_until(b"Stopped")
        eventually(lambda: in_foreground(stage.launched["a"].pid, "bash"))
        client.type(b"fg\n")
        eventually(lambda: in_foreground(stage.launched["a"].pid, "cat"))
        client.type(b"echoed by cat\n")
        client.read_until(b"echoed by cat\r\nechoed by cat\r\n")
        client.type(b"\x03")
        client.read_until(b"^C")
        eventually(lambda: in_foreground(stage.launched["a"].pid, "bash"))
        client.type(b"echo was $?; exit 5\n")
        client.read_until(b"was 130\r\n")
        client.read_to_end()
        assert client.status == "5"
    assert exit_status(stage) == 5
    assert "echoed by cat\nechoed by cat" in stage.output()


def test_a_size_that_changes_is_told_to_the_command(stage: Stage) -> None:
    stage.python(ON_RESIZE, io=InputOutput.TERMINAL, rows=10, columns=20)
    with stage.attach() as client:
        client.read_until(b"ready 10 20\r\n")
        client.resize(50, 60)
        client.read_until(b"now 50 60\r\n")
        stage.keeper.resize("a", 70, 80)
        client.read_until(b"now 70 80\r\n")


def test_output_from_before_the_attachment_is_not_lost(stage: Stage) -> None:
    stage.launch("sh", "-c", "seq 30000; exit 3", io=InputOutput.TERMINAL)
    assert stage.wait_for_exit() == 3
    with stage.attach() as late:
        seen = late.read_to_end()
        assert seen.replace(b"\r\n", b"\n") == b"".join(b"%d\n" % number for number in range(1, 30001))
        assert late.status == "3"
    with stage.attach(position=len(seen) - 7) as later:
        assert later.read_to_end() == b"30000\r\n"
    with stage.attach(position=None) as latest:
        assert latest.read_to_end() == b""


def test_several_clients_see_and_type_on_the_same_terminal(stage: Stage) -> None:
    start_bash(stage)
    with stage.attach() as one, stage.attach() as other:
        one.type(b"X=41\n")
        one.read_until(b"X=41")
        other.type(b"echo $((X+1))\n")
        one.read_until(b"42\r\n")
        other.read_until(b"42\r\n")


def test_a_client_that_does_not_read_holds_up_nobody(stage: Stage) -> None:
    start_bash(stage)
    with stage.attach() as stuck, stage.attach() as client:
        client.type(b"seq 400000 | tail -c 2000000; echo done''now\n")
        client.read_until(b"donenow")
        stuck.read_until(b"donenow")  # it gets everything after all, at its own pace


def test_input_the_session_does_not_read_holds_up_nobody(stage: Stage) -> None:
    stage.python(
        "import time, tty; tty.setraw(0); print('ready', flush=True); time.sleep(1000)", io=InputOutput.TERMINAL
    )
    stage.wait_for_output("ready")
    with stage.attach() as client:
        client.socket.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while True:
                client.type(b"x" * 4096)
        stage.launch("true", session="b")
        assert stage.wait_for_exit("b") == 0


def test_input_typed_while_the_session_is_away_is_announced_and_kept(stage: Stage) -> None:
    start_bash(stage)
    events = Events(stage.paths)
    with contextlib.closing(events), stage.attach() as client:
        client.read_until(b"$ ")
        stage.keeper.away("a", True)
        client.type(b"echo back''again\n")
        assert next(iter(events)) == {"event": "input", "session": "a"}
        with contextlib.closing(Events(stage.paths)) as newcomer:
            assert next(iter(newcomer)) == {"event": "input", "session": "a"}
        stage.keeper.away("a", False)
        client.read_until(b"backagain\r\n")


def test_an_end_while_away_is_the_sessions_end_only_with_a_status(stage: Stage) -> None:
    stage.launch("sleep", "1000")
    stage.launch("sh", "-c", "sleep 0.2; exit 4", session="b")
    with contextlib.closing(Events(stage.paths)) as events:
        stage.keeper.away("a", True)
        stage.keeper.away("b", True)
        stage.keeper.kill("a")
        assert next(iter(events)) == {"event": "exit", "session": "b", "status": 4}
        eventually(lambda: stage.keeper.sessions() == [])
    assert exit_status(stage) is None


def test_only_the_owner_and_root_may_attach(stage: Stage) -> None:
    start_bash(stage, caller=user())
    stage.launch("sleep", "1000", session="b", io=InputOutput.STREAMS)
    for session, want, uid, allowed in (
        ("a", "terminal", USER, True),
        ("a", "terminal", USER + 1, False),
        ("b", "stdin", USER, False),
    ):
        answer = as_user(uid, stage, {"session": session, "want": want})
        assert answer["ok"] is allowed, answer
    refused = as_user(USER + 1, stage, {"session": "a"})
    assert refused == as_user(USER + 1, stage, {"session": "no-such"})  # not even whether it exists


def test_the_control_socket_is_for_root_alone(stage: Stage) -> None:
    program = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
    command = [PYTHON, "-c", program, str(stage.paths.keeper_socket)]
    done = subprocess.run(command, user=USER, group=USER, capture_output=True, check=False, cwd="/")
    assert b"PermissionError" in done.stderr


@pytest.mark.parametrize(
    "sent",
    [
        b"\n",
        b"no json\n",
        b"[]\n",
        b'{"session": 1}\n',
        b'{"session": "../a"}\n',
        b'{"session": "no-such"}\n',
        b'{"session": "a", "from": []}\n',
        b'{"session": "a", "from": 1e999}\n',
        b"[" * 4000 + b"\n",
        b"x" * 10_000,
        b'{"session": "a"}\nz\0\0\0\0',
        b'{"session": "a"}\nd\xff\xff\xff\xff',
        b'{"session": "a"}\nr\0\0\0\4x y ',
        b'{"session": "a"}\nr\0\0\0\4-1 1',
        b'{"session": "a"}\nx\0\0\0\0010',
    ],
)
def test_who_breaks_the_rules_loses_the_connection_and_nothing_else(stage: Stage, sent: bytes) -> None:
    start_bash(stage)
    with stage.attach() as client:
        client.read_until(b"$ ")
        with socket.socket(socket.AF_UNIX) as hostile:
            hostile.settimeout(PATIENCE)
            hostile.connect(str(stage.paths.attach_socket))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                hostile.sendall(sent)
                while hostile.recv(65536):
                    pass
        client.type(b"echo still''here\n")
        client.read_until(b"stillhere")


def test_half_a_line_or_half_a_frame_holds_up_nobody(stage: Stage) -> None:
    start_bash(stage)
    with contextlib.ExitStack() as stack:
        for sent in (b"", b'{"sess', b'{"session": "a"}\nd\0\0', b'{"session": "a"}\nd\0\0\1\0abc'):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(stage.paths.attach_socket))
            silent.sendall(sent)
        client = stack.enter_context(stage.attach())
        client.type(b"echo still''here\n")
        client.read_until(b"stillhere")


def test_one_user_cannot_take_all_connections(stage: Stage) -> None:
    start_bash(stage)
    flood = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for one in flood:
        one.connect(str(stage.paths.attach_socket))
    answer = as_user(USER, stage, {"session": "no-such"})
    assert answer["ok"] is False
    for one in flood:
        one.close()
    with stage.attach() as client:
        client.read_until(b"$ ")


def test_stdin_is_given_once_and_its_end_is_exact(stage: Stage) -> None:
    stage.launch("sh", "-c", "cat; echo over >&2; exit 6", io=InputOutput.STREAMS)
    fd = open_stdin(stage.paths.attach_socket, "a")
    with pytest.raises(EngineError, match="taken already"):
        open_stdin(stage.paths.attach_socket, "a")
    os.write(fd, b"one\n")
    stage.wait_for_output("one")
    written = threading.Thread(target=write_all, args=(fd, b"x" * 300_000 + b"\n"))
    written.start()
    written.join()
    assert stage.output(name="err.log") == ""
    os.close(fd)
    assert stage.wait_for_exit() == 6
    assert stage.output() == "one\n" + "x" * 300_000 + "\n"


def test_stdin_that_nobody_will_write_to_can_be_ended(stage: Stage) -> None:
    stage.launch("cat", io=InputOutput.STREAMS)
    stage.keeper.close_stdin("a")
    assert stage.wait_for_exit() == 0


def test_who_writes_to_a_session_that_has_ended_is_told(stage: Stage) -> None:
    stage.launch("sleep", "1000", io=InputOutput.STREAMS)
    fd = open_stdin(stage.paths.attach_socket, "a")
    stage.keeper.kill("a")
    assert stage.wait_for_exit() == 128 + signal.SIGKILL
    with pytest.raises(BrokenPipeError):
        os.write(fd, b"x")
    os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def as_user(uid: int, stage: Stage, request: dict[str, str]) -> dict[str, object]:
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        " s.sendall(sys.argv[2].encode() + b'\\n'); print(s.recv(4096).partition(b'\\n')[0].decode())"
    )
    command = ["/usr/bin/python3", "-I", "-S", "-c", program, str(stage.paths.attach_socket), json.dumps(request)]
    done = subprocess.run(command, user=uid, group=uid, extra_groups=[], stdout=subprocess.PIPE, check=True, cwd="/")
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_frames_are_as_documented(stage: Stage) -> None:
    stage.launch("sh", "-c", "printf hi; exit 2", io=InputOutput.TERMINAL)
    assert stage.wait_for_exit() == 2
    with Attached(stage.paths.attach_socket, "a", 0) as client:
        assert client.stream.read() == struct.pack(">cI", b"d", 2) + b"hi" + struct.pack(">cI", b"x", 1) + b"2"
