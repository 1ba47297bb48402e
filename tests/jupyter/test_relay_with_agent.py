"""The relay with the real agent: kernels are saved by CRIU, their processes end, and the next cell brings them back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from tests.installation import Installation, eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.talk import collect, run

from torpor.errors import Conflict
from torpor.jupyter import install
from torpor.jupyter.connection import CHANNELS


def session_of(installation: Installation) -> dict[str, Any]:
    """The newest kernel session."""
    sessions = [session for session in installation.client.sessions() if session["kind"] == "kernel"]
    return max(sessions, key=lambda session: float(session["created"]))


def is_open(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def state_of(installation: Installation) -> str:
    return str(session_of(installation)["state"])


def save(installation: Installation, session: str) -> None:
    """Hibernates as soon as the agent knows that the kernel's cell has ended."""

    def is_saved() -> bool:
        try:
            installation.operate(session, "hibernate", if_idle=True)
        except Conflict:
            return False
        return True

    eventually(is_saved, bool)


def hibernate(installation: Installation) -> dict[str, Any]:
    session = session_of(installation)["id"]
    save(installation, session)
    seen = installation.client.session(session)
    assert seen["state"] == "hibernated"
    assert seen["pids"] == []
    return seen


@pytest.mark.timeout(900)
def test_every_line_and_reply_of_100_wakes(real_kernel: Kernel, installation: Installation) -> None:
    lines = "".join(f"line {number}\n" for number in range(30))
    run(real_kernel.client, "total = 0")
    for cycle in range(100):
        hibernate(installation)
        answer = run(
            real_kernel.client, "total += 1\nfor number in range(30): print('line', number, flush=True)\ntotal"
        )
        assert (answer.status, answer.stdout, answer.result) == ("ok", lines, str(cycle + 1))


@pytest.mark.parametrize("tenths", range(0, 20, 2))
def test_a_cell_at_any_moment_of_a_hibernation_runs_once(
    real_kernel: Kernel, installation: Installation, tenths: int
) -> None:
    run(real_kernel.client, "count = 0")
    session = session_of(installation)
    saving = threading.Thread(target=save, args=(installation, session["id"]))
    saving.start()
    if tenths:  # at first the kernel is quiesced, then dumped, committed, verified, ended
        installation.client.watch(session["id"], session["version"], timeout=10)
        threading.Event().wait(tenths / 20)
    answer = run(real_kernel.client, "count += 1\nprint('once')\ncount")
    assert (answer.stdout, answer.result) == ("once\n", "1")
    saving.join()
    assert run(real_kernel.client, "count").result == "1"


def test_input_and_interrupts_work_after_waking(real_kernel: Kernel, installation: Installation) -> None:
    hibernate(installation)
    request = real_kernel.client.execute("name = input('? ')", allow_stdin=True)
    assert real_kernel.client.get_stdin_msg(timeout=60)["content"]["prompt"] == "? "
    real_kernel.client.input("Ada")
    collect(real_kernel.client, request)
    request = real_kernel.client.execute("print(name)\nimport time\ntime.sleep(100)")
    while real_kernel.client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
        pass
    real_kernel.manager.interrupt_kernel()
    assert collect(real_kernel.client, request).reply["content"]["ename"] == "KeyboardInterrupt"


def test_questions_do_not_wake_and_restart_does_not_either(real_kernel: Kernel, installation: Installation) -> None:
    run(real_kernel.client, "x = 1")
    session = hibernate(installation)
    newcomer = real_kernel.connect()
    collect(newcomer, newcomer.comm_info())
    assert state_of(installation) == "hibernated"
    real_kernel.manager.restart_kernel()
    ended = installation.client.session(session["id"])
    assert ended["state"] == "ended"
    assert len(ended["checkpoints"]) == 1
    real_kernel.client.wait_for_ready(timeout=60)
    assert run(real_kernel.client, "'x' in globals()").result == "False"


def test_shutdown_keeps_the_checkpoint(real_kernel: Kernel, installation: Installation) -> None:
    session = hibernate(installation)
    relay = real_kernel.manager.provisioner.process
    real_kernel.manager.shutdown_kernel()
    assert relay.wait(10) == 0
    ended = installation.client.session(session["id"])
    assert (ended["state"], len(ended["checkpoints"])) == ("ended", 1)


def test_a_kernel_that_dies_is_dead(real_kernel: Kernel, installation: Installation) -> None:
    hibernate(installation)
    relay = real_kernel.manager.provisioner.process
    real_kernel.client.execute("import os; os._exit(7)")
    assert relay.wait(30) == 7


def test_a_killed_agent_is_waited_for(real_kernel: Kernel, installation: Installation) -> None:
    run(real_kernel.client, "x = 41")
    hibernate(installation)
    installation.kill()
    request = real_kernel.client.execute("x + 1")
    installation.start()
    assert collect(real_kernel.client, request).result == "42"


def test_a_killed_relay_loses_nothing(real_kernel: Kernel, installation: Installation) -> None:
    run(real_kernel.client, "x = 41")
    hibernate(installation)
    real_kernel.manager.provisioner.process.kill()
    real_kernel.manager.provisioner.process.wait()
    real_kernel.manager.start_kernel()
    real_kernel.client.wait_for_ready(timeout=60)
    assert state_of(installation) == "hibernated"
    assert run(real_kernel.client, "x").result == "41"


def test_the_session_carries_what_identifies_it(real_kernel: Kernel, installation: Installation) -> None:
    session = session_of(installation)
    assert session["labels"]["jupyter.connection_file"] == real_kernel.manager.connection_file


@pytest.mark.usefixtures("torpor_by_default")
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_encrypted_channels_survive(installation: Installation, transport: str) -> None:
    kernel = Kernel(transport=transport, transport_encryption="required")
    kernel.manager.kernel_spec.metadata["supported_encryption"] = "curve"
    try:
        client = kernel.start()
        run(client, "x = 41")
        hibernate(installation)
        assert run(client, "x").result == "41"
        assert run(client, "print('y' * 50_000_000)").stdout == "y" * 50_000_000 + "\n"
    finally:
        kernel.close()


def test_a_kernelspecs_command_started_as_vs_code_does(installation: Installation, home: Path) -> None:
    """No provisioner, no manager: a connection file with ports of its own, the command, signals."""
    (change,) = install.install(["python3"], install.user_kernels())
    spec = json.loads((change.folder / "kernel.json").read_text())
    file, facts = write_connection_file(str(home / "jupyter_runtime_dir" / "kernel-v2-1.json"))
    argv = [argument.replace("{connection_file}", file) for argument in spec["argv"]]
    process = subprocess.Popen(argv, env={**os.environ, **spec["env"]}, cwd=home, stdin=subprocess.DEVNULL)
    client = BlockingKernelClient(connection_file=file)
    client.load_connection_file()
    try:
        eventually(lambda: all(is_open(facts[f"{channel}_port"]) for channel in CHANNELS), bool)
        client.start_channels()
        client.wait_for_ready(timeout=60)
        assert run(client, "x = 41").status == "ok"
        hibernate(installation)
        collect(client, client.kernel_info())
        assert state_of(installation) == "hibernated"
        assert run(client, "x + 1").result == "42"
        request = client.execute("print('begun', flush=True); import time; time.sleep(100)")
        while client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
            pass
        process.send_signal(signal.SIGINT)
        assert collect(client, request).reply["content"]["ename"] == "KeyboardInterrupt"
        session = hibernate(installation)["id"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        ended = installation.client.session(session)
        assert (ended["state"], len(ended["checkpoints"])) == ("ended", 2)
    finally:
        client.stop_channels()
        process.kill()
