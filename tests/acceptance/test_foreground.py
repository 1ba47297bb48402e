"""`torpor run` in the foreground, across hibernation: what is typed, shown, piped and signalled goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.cli.terminal import Terminal, terminal
from tests.installation import PATIENCE, PYTHON, Installation, eventually

LINES = 20_000
PASS_ON = "import os\nwhile piece := os.read(0, 4096): os.write(1, piece)"


@pytest.fixture
def shell(shared_agent: Installation) -> Iterator[Terminal]:
    """An interactive bash in the foreground of a terminal."""
    bash = ("bash", "--norc", "--noprofile", "-i")
    with terminal(
        shared_agent, "run", "--name", "shell", "--env", "PS1=ready> ", "--", *bash, rows=31, columns=97
    ) as opened:
        opened.read_until("ready> ")
        yield opened
    shared_agent.client.remove("shell", force=True)


def away_and_back(agent: Installation, name: str) -> None:
    agent.operate(name, "hibernate")
    assert agent.client.session(name)["pids"] == []
    agent.operate(name, "resume")


def test_a_shell_goes_on_with_its_variables_jobs_and_size(shared_agent: Installation, shell: Terminal) -> None:
    shell.type("kept=value; sleep 1000 & sleep 2000\n")
    eventually(lambda: "sleep 2000" in commands(shared_agent, "shell"), bool)
    shell.type("\x1a")
    shell.read_until("Stopped")
    for cycle in range(2):
        away_and_back(shared_agent, "shell")
        shell.type(f"echo cycle-{cycle} $kept $(stty size) $(jobs | wc -l) e''nd\n")
        shell.read_until(f"cycle-{cycle} value 31 97 2 end")
    shell.resize(44, 120)
    shell.command.send_signal(signal.SIGWINCH)
    shell.type("until [ \"$(stty size)\" = '44 120' ]; do sleep 0.1; done; echo resi''zed\n")
    shell.read_until("resized")
    shell.type("fg %2\n")
    eventually(lambda: shell.seen.endswith(b"sleep 2000\r\n") or shell._read(0.1), bool)
    away_and_back(shared_agent, "shell")
    shell.type("\x03")
    shell.type("echo interrupted-$?\n")
    shell.read_until("interrupted-130")
    shell.type("exit 7\n")
    assert shell.wait() == 7
    assert shell.modes() == shell.before


def test_typing_wakes_a_session_and_nothing_typed_is_lost(shared_agent: Installation, shell: Terminal) -> None:
    shared_agent.operate("shell", "hibernate")
    shell.type("echo wo''ken\n")
    shell.read_until("woken")
    shared_agent.wait_for_state("shell", "running")
    shell.type("exit 0\n")
    assert shell.wait() == 0


def test_a_window_resized_while_away_is_seen_after_waking(shared_agent: Installation, shell: Terminal) -> None:
    shared_agent.operate("shell", "hibernate")
    shell.resize(50, 133)
    shell.command.send_signal(signal.SIGWINCH)
    shared_agent.operate("shell", "resume")
    shell.type("until [ \"$(stty size)\" = '50 133' ]; do sleep 0.1; done; echo resi''zed\n")
    shell.read_until("resized")
    shell.type("exit 0\n")
    assert shell.wait() == 0


@pytest.mark.parametrize("kinds", [("hibernate", "resume"), ("checkpoint",)])
def test_what_is_piped_through_comes_out_once_and_whole(shared_agent: Installation, kinds: tuple[str, ...]) -> None:
    """Half is written before, half while it is away or saved; the end is seen exactly once."""
    command = [sys.executable, "-m", "torpor", "run", "--name", "pipe", "--", PYTHON, "-c", PASS_ON]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=shared_agent.environment, stdin=pipe, stdout=pipe) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        half = "".join(f"line {number}\n" for number in range(LINES)).encode()
        run.stdin.write(half)
        run.stdin.flush()
        seen = run.stdout.read(1000)
        shared_agent.operate("pipe", kinds[0])
        run.stdin.write(b"between\n" * 1000)
        run.stdin.flush()
        for kind in kinds[1:]:
            shared_agent.operate("pipe", kind)
        run.stdin.write(half)
        run.stdin.close()
        seen += run.stdout.read()
        assert seen == half + b"between\n" * 1000 + half
        assert run.wait(PATIENCE) == 0
    shared_agent.client.remove("pipe")


def test_the_end_of_input_that_comes_while_away_is_not_lost(shared_agent: Installation) -> None:
    command = [sys.executable, "-m", "torpor", "run", "--name", "end", "--", "sh", "-c", "cat; echo over; exit 3"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=shared_agent.environment, stdin=pipe, stdout=pipe) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdin.write(b"first\n")
        run.stdin.flush()
        assert run.stdout.readline() == b"first\n"
        shared_agent.operate("end", "hibernate")
        run.stdin.write(b"last\n")
        run.stdin.close()
        shared_agent.operate("end", "resume")
        assert run.stdout.read() == b"last\nover\n"
        assert run.wait(PATIENCE) == 3
    shared_agent.client.remove("end")


def test_signals_reach_a_session_that_has_been_away(shared_agent: Installation) -> None:
    handler = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(40)); print('up', flush=True)"
    command = [sys.executable, "-m", "torpor", "run", "--name", "signalled", "--", PYTHON, "-c"]
    pipe = subprocess.PIPE
    program = f"{handler}\nwhile True: signal.pause()"
    with subprocess.Popen(
        [*command, program], env=shared_agent.environment, stdin=subprocess.DEVNULL, stdout=pipe
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        away_and_back(shared_agent, "signalled")
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 40
    shared_agent.client.remove("signalled")


def test_a_command_that_is_ended_while_its_session_is_away_leaves_it_there(shared_agent: Installation) -> None:
    with terminal(shared_agent, "run", "--name", "left", "--", "cat") as opened:
        opened.type("hello\n")
        opened.read_until("hello\r\nhello")
        shared_agent.operate("left", "hibernate")
    assert shared_agent.client.session("left")["state"] == "hibernated"
    shared_agent.operate("left", "resume")
    assert json.loads(shared_agent.torpor("show", "left", "--json").stdout)["state"] == "running"
    shared_agent.client.remove("left", force=True)


def commands(agent: Installation, name: str) -> list[str]:
    """The command lines of a session's processes."""
    found = []
    for pid in agent.client.session(name)["pids"]:
        if os.path.exists(f"/proc/{pid}/cmdline"):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found.append(file.read().decode().replace("\0", " ").strip())
    return found
