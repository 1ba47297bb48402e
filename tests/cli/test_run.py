"""`torpor run` in the foreground behaves like the command itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.terminal import terminal
from tests.installation import PATIENCE, PYTHON, Installation, eventually

from torpor.errors import Conflict, TorporError, UsageError


def started(agent: Installation, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torpor", "run", *arguments]
    return subprocess.Popen(command, env=agent.environment, text=True, **{"stdin": subprocess.DEVNULL, **streams})


def only_session(agent: Installation, name: str) -> dict[str, Any]:
    found = eventually(
        lambda: [one for one in agent.client.sessions() if one["name"] == name and one["state"] == "running"], bool
    )
    return found[0]


def test_output_goes_where_it_belongs(shared_agent: Installation) -> None:
    done = shared_agent.torpor("run", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)


def test_standard_input_is_passed_on_with_its_end(shared_agent: Installation) -> None:
    text = "line\n" * 100_000
    assert shared_agent.torpor("run", "--", "wc", "-c", stdin=text).stdout.split() == [str(len(text))]
    assert shared_agent.torpor("run", "--", "cat", stdin="").stdout == ""


def test_large_output_arrives_whole(shared_agent: Installation) -> None:
    done = shared_agent.torpor("run", "--", PYTHON, "-c", "for i in range(200000): print(i)")
    assert done.stdout.split() == [str(number) for number in range(200_000)]


def test_environment_directory_and_umask_are_the_callers(shared_agent: Installation, tmp_path: Path) -> None:
    done = shared_agent.torpor(
        "run", "--cwd", str(tmp_path), "--env", "K=a=b", "--", "sh", "-c", 'pwd; echo "$K $OTHER"; umask', OTHER="other"
    )
    assert done.stdout == f"{tmp_path}\na=b other\n{os.umask(os.umask(0o022)):04o}\n"


@pytest.mark.parametrize(("command", "status"), [("no-such-command", 127), ("/etc/passwd", 126)])
def test_a_command_that_cannot_run_has_a_shells_status(shared_agent: Installation, command: str, status: int) -> None:
    done = shared_agent.torpor("run", "--", command)
    assert done.returncode == status
    assert command in done.stderr


def test_a_killed_command_has_a_shells_status(shared_agent: Installation) -> None:
    assert shared_agent.torpor("run", "--", "sh", "-c", "kill -KILL $$").returncode == 137


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(shared_agent: Installation, signum: signal.Signals) -> None:
    handler = f"import signal, sys; signal.signal({int(signum)}, lambda *_: sys.exit(40)); print('up', flush=True)"
    run = started(shared_agent, "--", PYTHON, "-c", f"{handler}\nwhile True: signal.pause()", stdout=subprocess.PIPE)
    assert run.stdout is not None
    with run:
        assert run.stdout.readline() == "up\n"
        run.send_signal(signum)
        assert run.wait(timeout=PATIENCE) == 40


def test_a_reader_that_goes_ends_the_command(shared_agent: Installation) -> None:
    run = started(shared_agent, "--name", "yes", "--", "yes", stdout=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(timeout=PATIENCE) == 141
    shared_agent.wait_for_state("yes", "failed")


def test_detached_returns_at_once(shared_agent: Installation) -> None:
    done = shared_agent.torpor(
        "run", "-d", "--name", "away", "--label", "a=b", "--idle-after", "1h", "--", "sleep", "99"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("away\n", "", 0)
    session = shared_agent.client.session("away")
    assert (session["state"], session["labels"], session["idle_after"]) == ("running", {"a": "b"}, 3600)
    shown = json.loads(shared_agent.torpor("run", "-d", "--json", "--", "sleep", "99").stdout)
    assert shown["name"].startswith("sleep-")


def test_options_end_where_the_command_begins(shared_agent: Installation) -> None:
    done = shared_agent.torpor("run", "echo", "-d", "--name", "x")
    assert done.stdout == "-d --name x\n"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--env", "novalue", "--", "true"], UsageError.exit_status, "K=V"),
        (["--idle-after", "soon", "--", "true"], UsageError.exit_status, "not a duration"),
        (["--json", "--", "true"], UsageError.exit_status, "goes with -d"),
        (["--cwd", "/no/such/folder", "--", "true"], None, "working directory"),
        ([], UsageError.exit_status, "Missing argument"),
    ],
)
def test_mistakes_are_told_in_sentences(
    shared_agent: Installation, arguments: list[str], status: int | None, words: str
) -> None:
    done = shared_agent.torpor("run", *arguments)
    assert done.returncode == status or status is None
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_in_use_is_a_conflict(shared_agent: Installation) -> None:
    shared_agent.run("sleep", "1000", name="taken")
    done = shared_agent.torpor("run", "-d", "--name", "taken", "--", "true")
    assert done.returncode == Conflict.exit_status
    assert "torpor rm taken" in done.stderr


def test_a_terminal_is_a_terminal(shared_agent: Installation) -> None:
    script = (
        "import os; print(os.isatty(0), os.isatty(1), *os.get_terminal_size(), os.ttyname(0)); input('? '); exit(5)"
    )
    with terminal(shared_agent, "run", "--", PYTHON, "-c", script, rows=31, columns=97) as screen:
        shown = screen.read_until("? ")
        assert "True True 97 31 /dev/pts/" in shown
        screen.type("yes\r")
        assert screen.wait() == 5
        assert screen.modes() == screen.before


def test_control_c_reaches_the_command(shared_agent: Installation) -> None:
    script = (
        "import time\ntry:\n print('up', flush=True)\n time.sleep(1000)\nexcept KeyboardInterrupt:\n print('caught')"
    )
    with terminal(shared_agent, "run", "--", PYTHON, "-c", script) as screen:
        screen.read_until("up")
        screen.type("\x03")
        assert screen.wait() == 0
        assert b"caught" in screen.seen


def test_a_resized_terminal_is_told(shared_agent: Installation) -> None:
    script = (
        "import os, signal\nsignal.signal(signal.SIGWINCH, lambda *_: print(*os.get_terminal_size(), flush=True))\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    with terminal(shared_agent, "run", "--name", "winch", "--", PYTHON, "-c", script) as screen:
        screen.read_until("up")
        screen.resize(40, 111)
        screen.read_until("111 40")
        shared_agent.client.end("winch", keep=False)
        assert screen.wait() == 143


def test_a_shell_has_job_control(shared_agent: Installation) -> None:
    with terminal(shared_agent, "run", "--", "bash", "--norc", "-i") as screen:
        screen.read_until("bash-")
        screen.type("/usr/bin/python3 -c 'import time; print(6*7, flush=True); time.sleep(1000)'\r")
        screen.read_until("42")
        screen.type("\x1a")
        screen.read_until("Stopped")
        screen.type("disown -a; exit 6\r")
        assert screen.wait() == 6


def test_the_foreground_outlives_the_agent(agent: Installation) -> None:
    file = agent.home / "go"
    script = f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.02)\nprint('done'); exit(8)"
    run = started(agent, "--name", "one", "--", PYTHON, "-c", script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    only_session(agent, "one")
    agent.kill()
    file.touch()
    assert run.communicate(timeout=PATIENCE) == ("done\n", "")
    assert run.returncode == 8


def test_a_terminal_outlives_agent_and_keeper(agent: Installation) -> None:
    script = "input('first? '); print('and', input('second? ')); exit(9)"
    with terminal(agent, "run", "--name", "one", "--", PYTHON, "-c", script) as screen:
        screen.read_until("first? ")
        screen.type("a\r")
        screen.read_until("second? ")
        keeper = agent.client.node()["keeper"]["pid"]
        os.kill(keeper, signal.SIGKILL)
        eventually(lambda: agent.client.node()["keeper"]["pid"], lambda pid: pid != keeper)
        agent.kill()
        screen.type("b\r")
        screen.read_until("and b")
        assert screen.wait() == 9


def test_a_foreground_session_may_be_hibernated_and_wakes_at_a_key(agent: Installation) -> None:
    with terminal(agent, "run", "--name", "one", "--", PYTHON, "-c", "print('got', input('? ')); exit(11)") as screen:
        screen.read_until("? ")
        agent.operate("one", "hibernate")
        screen.type("it\r")
        screen.read_until("got it")
        assert screen.wait() == 11


def test_a_foreground_stream_goes_on_after_a_hibernation(agent: Installation) -> None:
    script = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)\nexit(12)"
    run = started(agent, "--name", "one", "--", PYTHON, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdin is not None
    assert run.stdout is not None
    with run:
        run.stdin.write("a\n")
        run.stdin.flush()
        assert run.stdout.readline() == "got a\n"
        agent.operate("one", "hibernate")
        run.stdin.write("b\n")
        run.stdin.flush()
        agent.operate("one", "resume")
        assert run.stdout.readline() == "got b\n"
        run.stdin.close()
        assert run.wait(timeout=PATIENCE) == 12


def test_a_session_removed_under_its_foreground_is_told(agent: Installation) -> None:
    run = started(agent, "--name", "one", "--", "sleep", "1000", stderr=subprocess.PIPE)
    only_session(agent, "one")
    agent.client.remove("one", force=True)
    _, told = run.communicate(timeout=PATIENCE)
    assert (run.returncode, told) in [(143, ""), (TorporError.exit_status, "torpor: The session was removed.\n")]
