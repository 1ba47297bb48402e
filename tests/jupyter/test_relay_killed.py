"""A relay that is killed while its kernel works is followed by one that goes on where it stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.jupyter.conftest import Kernel
from tests.jupyter.standin import StandInAgent
from tests.jupyter.talk import collect, run

LINES = 250
TWO_THREADS = f"""
import sys, threading, time
def count(name):
    for number in range({LINES}):
        sys.stdout.write(f"{{name}} {{number}}\\n")
        sys.stdout.flush()
        time.sleep(0.01)
threads = [threading.Thread(target=count, args=(name,)) for name in "ab"]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"done"
"""


def kill_and_follow(kernel: Kernel) -> None:
    relay = kernel.manager.provisioner.process
    relay.kill()
    relay.wait()
    kernel.manager.start_kernel()


def first_output(kernel: Kernel) -> None:
    while kernel.client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
        pass


def test_a_cell_goes_on_and_every_line_and_its_reply_arrive(kernel: Kernel, agent: StandInAgent) -> None:
    request = kernel.client.execute(TWO_THREADS)
    said = ""
    while "a 20\n" not in said:
        message = kernel.client.get_iopub_msg(timeout=60)
        said += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
    kill_and_follow(kernel)
    answer = collect(kernel.client, request)
    said += answer.stdout
    found: dict[str, list[int]] = {"a": [], "b": []}
    for line in said.splitlines():
        name, number = line.split()
        found[name].append(int(number))
    assert found == {"a": list(range(LINES)), "b": list(range(LINES))}
    assert (answer.status, answer.result) == ("ok", "'done'")
    assert len(agent.sessions) == 1
    assert run(kernel.client, "6 * 7").result == "42"


def test_what_was_said_while_there_was_no_relay_arrives(kernel: Kernel, agent: StandInAgent) -> None:
    flag = agent.home / "go-on"
    request = kernel.client.execute(
        f"import os, time\nprint('before', flush=True)\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        f"print('meanwhile', flush=True)\ntime.sleep(0.2)\nopen({str(flag)!r} + '-said', 'w').close()\n'done'"
    )
    first_output(kernel)
    relay = kernel.manager.provisioner.process
    relay.kill()
    relay.wait()
    flag.touch()
    wait_for(flag.with_name("go-on-said"))
    kernel.manager.start_kernel()
    answer = collect(kernel.client, request)
    assert (answer.stdout, answer.result) == ("meanwhile\n", "'done'")


def test_an_input_that_waits_is_answered_through_the_next_relay(kernel: Kernel, agent: StandInAgent) -> None:
    request = kernel.client.execute("print(input('? '))", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=60)["content"]["prompt"] == "? "
    kill_and_follow(kernel)
    kernel.client.input("Ada")
    assert collect(kernel.client, request).stdout == "Ada\n"


def test_a_relay_that_is_killed_while_its_kernel_sleeps_at_work(kernel: Kernel, agent: StandInAgent) -> None:
    request = kernel.client.execute(TWO_THREADS)
    first_output(kernel)
    agent.hibernate(agent.only)
    kill_and_follow(kernel)
    second = kernel.client.execute("6 * 7")
    answer = collect(kernel.client, request)
    assert answer.result == "'done'"
    assert f"a {LINES - 1}\n" in answer.stdout
    assert collect(kernel.client, second).result == "42"


def test_a_relay_whose_bookmark_is_gone_begins_anew(kernel: Kernel, agent: StandInAgent) -> None:
    run(kernel.client, "x = 41")
    (bookmark,) = agent.home.glob("jupyter_runtime_dir/*.torpor/bookmark")
    relay = kernel.manager.provisioner.process
    relay.kill()
    relay.wait()
    bookmark.unlink()
    kernel.manager.start_kernel()
    kernel.client.wait_for_ready(timeout=60)
    assert run(kernel.client, "x + 1").result == "42"


@pytest.mark.parametrize("times", [3])
def test_one_relay_after_the_other(kernel: Kernel, agent: StandInAgent, times: int) -> None:
    run(kernel.client, "count = 0")
    for number in range(times):
        kill_and_follow(kernel)
        kernel.client.wait_for_ready(timeout=60)
        assert run(kernel.client, "count += 1\ncount").result == str(number + 1)
    kernel.manager.provisioner.process.send_signal(signal.SIGTERM)
    agent.wait_for(agent.only, "ended")


def wait_for(path: Path) -> None:
    from tests.installation import eventually

    eventually(path.exists, bool)
