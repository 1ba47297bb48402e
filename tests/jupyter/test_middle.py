"""Kernels are hibernated and saved in the middle of anything, with the real agent; no client sees any of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from tests.installation import Installation, eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.talk import Answer, collect, is_silent, run, send

from torpor.engine import procfs
from torpor.errors import Conflict

TWO_THREADS = """
import sys, threading, time
def count(name):
    for number in range({lines}):
        sys.stdout.write(f"{{name}} {{number}}\\n")
        sys.stdout.flush()
        time.sleep(0.01)
threads = [threading.Thread(target=count, args=(name,)) for name in "ab"]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"done"
"""
LIBRARY_SIGNALS = 0b11 << 31  # 32 and 33, which belong to the C library
MUCH = 100_000_000
PAUSE = 0.2  # seconds that a kernel runs between two hibernations


class Session:
    """The session of the kernel under test, as its owner sees it."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        found = [session for session in installation.client.sessions() if session["kind"] == "kernel"]
        self.id = max(found, key=lambda session: float(session["created"]))["id"]

    def facts(self) -> dict[str, Any]:
        return self.installation.client.session(self.id)

    def last_outcome(self) -> str | None:
        with self.installation.registry() as registry:
            operation = registry.last_operation(self.id)
        return operation.outcome if operation else "none yet"

    def hibernate(self) -> None:
        eventually(self.last_outcome, lambda outcome: outcome is not None)  # a wake ends after the first answer
        self.installation.operate(self.id, "hibernate")
        facts = self.facts()
        assert (facts["state"], facts["pids"]) == ("hibernated", [])

    def resume(self) -> None:
        self.installation.operate(self.id, "resume")

    def cycle_while_clients_send(self, times: int) -> None:
        """As `cycle`; a message that the relay could not pass on any more wakes the kernel at once."""
        for _ in range(times):
            eventually(self.last_outcome, lambda outcome: outcome is not None)
            self.installation.operate(self.id, "hibernate")
            with contextlib.suppress(Conflict):
                self.resume()
            eventually(lambda: self.facts()["state"], "running".__eq__)
            time.sleep(PAUSE)

    def cycle(self, times: int) -> None:
        for _ in range(times):
            self.hibernate()
            self.resume()
            time.sleep(PAUSE)


@pytest.fixture
def session(real_kernel: Kernel, installation: Installation) -> Session:
    return Session(installation)


@pytest.fixture
def client(real_kernel: Kernel) -> BlockingKernelClient:
    return real_kernel.client


def started(client: BlockingKernelClient, code: str, **settings: Any) -> str:
    """Runs a cell until its first output."""
    request = client.execute(f"print('started', flush=True)\n{code}", **settings)
    while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
        pass
    return request


def lines_of(answer: Answer) -> dict[str, list[int]]:
    """The numbers that each thread has printed."""
    found: dict[str, list[int]] = {}
    for line in answer.stdout.splitlines():
        name, number = line.split()
        found.setdefault(name, []).append(int(number))
    return found


def kernel_report(session: Session) -> dict[str, Any]:
    kernel: dict[str, Any] = session.facts()["kernel"] or {}
    return kernel


@pytest.mark.timeout(600)
def test_two_threads_that_print_ten_hibernations_and_every_line(client: BlockingKernelClient, session: Session) -> None:
    request = client.execute(TWO_THREADS.format(lines=400))
    session.cycle(10)
    answer = collect(client, request)
    assert lines_of(answer) == {"a": list(range(400)), "b": list(range(400))}
    assert (answer.status, answer.result) == ("ok", "'done'")
    assert answer.kinds.count("execute_input") == 1
    assert run(client, "1 + 1").result == "2"


def test_a_thread_that_prints_while_no_cell_runs_loses_no_line(client: BlockingKernelClient, session: Session) -> None:
    request = run(
        client,
        "import threading, time\ndef count():\n    for number in range(300):\n        print('t', number, flush=True)\n"
        "        time.sleep(0.01)\nthreading.Thread(target=count).start()",
    )
    session.cycle(3)
    said = request.stdout
    while "t 299\n" not in said:
        message = client.get_iopub_msg(timeout=60)
        said += message["content"]["text"] if message["msg_type"] == "stream" else ""
    assert said == "".join(f"t {number}\n" for number in range(300))


def test_checkpoints_under_load_change_nothing(client: BlockingKernelClient, session: Session) -> None:
    request = client.execute(TWO_THREADS.format(lines=200))
    for _ in range(4):
        session.installation.operate(session.id, "checkpoint")
    answer = collect(client, request)
    assert lines_of(answer) == {"a": list(range(200)), "b": list(range(200))}
    assert answer.kinds == [
        "status",
        "execute_input",
        *["stream"] * answer.kinds.count("stream"),
        "execute_result",
        "status",
    ]
    assert answer.result == "'done'"


def test_an_input_that_waits(client: BlockingKernelClient, session: Session) -> None:
    request = client.execute("first, second = input('1? '), input('2? ')\nfirst + second", allow_stdin=True)
    assert client.get_stdin_msg(timeout=60)["content"]["prompt"] == "1? "
    session.cycle(2)
    client.input("one")
    assert client.get_stdin_msg(timeout=60)["content"]["prompt"] == "2? "
    session.hibernate()
    client.input("two")  # wakes it
    answer = collect(client, request)
    assert answer.result == "'onetwo'"
    assert not client.stdin_channel.msg_ready()


def test_a_display_that_is_updated(client: BlockingKernelClient, session: Session) -> None:
    request = client.execute(
        "import time\nshown = display('first', display_id=True)\n"
        "for number in range(300):\n    shown.update(number)\n    time.sleep(0.005)"
    )
    session.cycle(4)
    answer = collect(client, request)
    updates = [m["content"]["data"]["text/plain"] for m in answer.published if m["msg_type"] == "update_display_data"]
    assert updates == [str(number) for number in range(300)]
    assert answer.status == "ok"


def test_comm_traffic(client: BlockingKernelClient, session: Session) -> None:
    run(
        client,
        "import time\nfrom IPython import get_ipython\n"
        "def opened(comm, message):\n"
        "    def echo(message):\n        time.sleep(0.005)\n        comm.send(message['content']['data'])\n"
        "    comm.on_msg(echo)\n"
        "get_ipython().kernel.comm_manager.register_target('echo', opened)",
    )
    send(client, "shell", "comm_open", {"comm_id": "c", "target_name": "echo", "data": {}})
    for number in range(300):
        send(client, "shell", "comm_msg", {"comm_id": "c", "data": {"number": number}})
    session.cycle_while_clients_send(3)
    for number in range(300, 310):
        send(client, "shell", "comm_msg", {"comm_id": "c", "data": {"number": number}})
    echoes: list[int] = []
    while len(echoes) < 310:
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "comm_msg":
            echoes.append(message["content"]["data"]["number"])
    assert echoes == list(range(310))
    assert run(client, "1 + 1").result == "2"
    assert not client.iopub_channel.msg_ready()


@pytest.mark.timeout(600)
def test_a_large_output_on_its_way(client: BlockingKernelClient, session: Session) -> None:
    request = started(
        client,
        f"for letter in 'abc': display({{'application/x-large': letter * {MUCH}}}, raw=True)\n'done'",
    )
    session.cycle(2)
    answer = collect(client, request)
    large = [m["content"]["data"]["application/x-large"] for m in answer.published if m["msg_type"] == "display_data"]
    assert [(len(text), text[0], text.count(text[0])) for text in large] == [(MUCH, letter, MUCH) for letter in "abc"]
    assert answer.result == "'done'"


def test_it_stays_away_and_busy_until_somebody_wakes_it(client: BlockingKernelClient, session: Session) -> None:
    run(client, "pass")  # nothing of the start is on its way any more
    flag = session.installation.home / "go-on"
    request = started(client, f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\nx = 41\nx")
    session.hibernate()
    flag.touch()
    question = client.kernel_info()
    assert is_silent(client, 2.0)  # as a kernel that runs a cell: the page goes on showing it busy
    assert kernel_report(session)["execution_state"] == "busy"
    on_control = send(client, "control", "kernel_info_request", {})
    assert collect(client, on_control, "control").reply["content"]["implementation"] == "ipython"
    assert session.facts()["state"] == "hibernated"
    second = client.execute("x + 1")
    assert collect(client, request).result == "41"
    assert client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] == question
    assert collect(client, second).result == "42"


@pytest.mark.parametrize("by", ["signal", "message"])
def test_an_interrupt_wakes_it_and_ends_the_cell(
    real_kernel: Kernel, client: BlockingKernelClient, session: Session, by: str
) -> None:
    request = started(client, "import time\ntime.sleep(1000)")
    session.hibernate()
    if by == "signal":
        real_kernel.manager.interrupt_kernel()
    else:
        send(client, "control", "interrupt_request", {})
    assert collect(client, request).reply["content"]["ename"] == "KeyboardInterrupt"
    assert run(client, "1 + 1").result == "2"


def test_a_restart_does_not_wake_it(real_kernel: Kernel, client: BlockingKernelClient, session: Session) -> None:
    started(client, "import time\ntime.sleep(1000)")
    session.hibernate()
    real_kernel.manager.restart_kernel()
    client.wait_for_ready(timeout=60)
    assert run(client, "'time' in globals()").result == "False"
    assert session.facts()["state"] == "ended"


def test_a_kernel_that_ends_in_the_middle_tells_its_last_words(
    real_kernel: Kernel, client: BlockingKernelClient, session: Session
) -> None:
    flag = session.installation.home / "say-it"
    started(
        client,
        f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "print('last words', flush=True)\ntime.sleep(0.5)\nos._exit(7)",
    )
    session.cycle(1)
    flag.touch()
    assert real_kernel.manager.provisioner.process.wait(60) == 7
    said = ""
    while "last words" not in said:
        said += client.get_iopub_msg(timeout=60)["content"].get("text", "")


def test_only_an_idle_kernel_is_hibernated_where_that_is_asked_for(
    client: BlockingKernelClient, session: Session
) -> None:
    request = started(client, "input()", allow_stdin=True)
    client.get_stdin_msg(timeout=60)
    for command in (["hibernate", session.id, "--if-idle"], ["hibernate", session.id, "--if-idle", "--json"]):
        refused = session.installation.torpor(*command)
        assert refused.returncode != 0
        assert "input" in refused.stderr
    client.input("x")
    assert collect(client, request).result == "'x'"
    eventually(lambda: kernel_report(session)["execution_state"], "idle".__eq__)
    assert session.installation.torpor("hibernate", session.id, "--if-idle").returncode == 0


def test_a_kernel_that_speaks_tcp_only_is_saved_at_quiet_moments(
    tcp_kernel: Kernel, installation: Installation
) -> None:
    session = Session(installation)
    request = started(tcp_kernel.client, "import time\ntime.sleep(3)\nx = 41")
    eventually(lambda: kernel_report(session)["execution_state"], "busy".__eq__)
    with pytest.raises(Conflict, match="TCP only"):
        session.hibernate()
    assert collect(tcp_kernel.client, request).status == "ok"
    eventually(lambda: kernel_report(session)["execution_state"], "idle".__eq__)
    session.hibernate()
    assert run(tcp_kernel.client, "x + 1").result == "42"


def test_a_relay_that_is_killed_in_the_middle_is_followed_by_another(
    real_kernel: Kernel, client: BlockingKernelClient, session: Session
) -> None:
    started(client, "import time\ntime.sleep(2)\nx = 41")
    session.hibernate()
    real_kernel.manager.provisioner.process.kill()
    real_kernel.manager.provisioner.process.wait()
    real_kernel.manager.start_kernel()
    client.wait_for_ready(timeout=60)
    assert session.facts()["state"] == "hibernated"
    assert run(client, "x + 1").result == "42"


def test_an_older_checkpoint_begins_a_new_conversation(client: BlockingKernelClient, session: Session) -> None:
    run(client, "x = 'older'")
    session.installation.operate(session.id, "checkpoint")
    run(client, "x = 'newer'")
    session.hibernate()
    newest = session.facts()["checkpoints"][0]["id"]
    with session.installation.registry() as registry:
        registry.mark_verified(newest, 0)
    assert run(client, "x").result == "'older'"
    session.cycle(1)
    assert run(client, "x").result == "'older'"


def test_who_does_not_know_the_secret_is_sent_away(
    real_kernel: Kernel, client: BlockingKernelClient, session: Session
) -> None:
    ip, port, *_ = inner_file(real_kernel).read_text().split("\n")
    strangers = [socket.create_connection((ip, int(port))) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        stranger.settimeout(60)
        assert stranger.recv(24).startswith(b"TORPOR/1")
        if number % 2:
            stranger.sendall(bytes(200))
    assert run(client, "6 * 7").result == "42"
    for number, stranger in enumerate(strangers):
        if number % 2:
            assert reads_nothing_more(stranger)
        stranger.close()
    session.cycle(1)
    assert run(client, "6 * 7").result == "42"


def test_the_inner_half_is_small_and_alone(client: BlockingKernelClient, session: Session) -> None:
    run(client, f"print('y' * {MUCH})")
    inner = named(session, "torpor-inner")
    threads = len(os.listdir(f"/proc/{inner}/task"))
    assert threads == 1
    assert eventually(lambda: procfs.rss_bytes([inner]), lambda size: size < 16 << 20, patience=10)
    maps = Path(f"/proc/{inner}/maps").read_text()
    assert "site-packages" not in maps
    assert "libcrypto" not in maps


def test_signals_and_process_group_are_as_without_it(client: BlockingKernelClient, session: Session) -> None:
    assert run(client, "import os\nos.getpgid(0) == os.getpid()").result == "True"
    words = run(client, "import subprocess\nprint(subprocess.getoutput('grep SigIgn /proc/self/status; env'))").stdout
    assert int(words.split()[1], 16) & ~LIBRARY_SIGNALS == 0
    assert "MALLOC" not in words
    os.kill(int(session.facts()["pids"][0]), signal.SIGTERM)
    assert session.installation.wait_for_state(session.id, "ended", "failed")["exit_status"] is not None


def named(session: Session, name: str) -> int:
    (found,) = [pid for pid in session.facts()["pids"] if Path(f"/proc/{pid}/comm").read_text().strip() == name]
    return int(found)


def inner_file(kernel: Kernel) -> Path:
    return Path(kernel.manager.connection_file.removesuffix(".json") + ".torpor") / "inner"


def reads_nothing_more(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:
        return True
