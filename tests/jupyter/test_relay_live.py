"""With the kernel awake, everything is as without Torpor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest
import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient
from tests.installation import eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.standin import StandInAgent
from tests.jupyter.talk import collect, run, send


def test_runs_cells(kernel: Kernel) -> None:
    answer = run(kernel.client, "print('hello'); 6 * 7")
    assert answer.status == "ok"
    assert answer.stdout == "hello\n"
    assert answer.result == "42"
    assert answer.kinds == ["status", "execute_input", "stream", "execute_result", "status"]


def test_errors_abort_what_is_queued(kernel: Kernel) -> None:
    first = kernel.client.execute("1/0")
    second = kernel.client.execute("2")
    assert collect(kernel.client, first).reply["content"]["ename"] == "ZeroDivisionError"
    assert collect(kernel.client, second).status == "aborted"


def test_several_clients_get_their_own_replies_and_everybodys_output(kernel: Kernel) -> None:
    one, two = kernel.client, kernel.connect()
    first, second = one.execute("print('one')"), two.execute("print('two')")
    assert collect(one, first).stdout == "one\n"
    assert collect(two, second).stdout == "two\n"
    third = two.execute("print('three')")
    collect(two, third)
    seen = []
    while "three\n" not in seen:
        message = one.get_iopub_msg(timeout=10)
        if message["msg_type"] == "stream":
            seen.append(message["content"]["text"])
    assert not one.shell_channel.msg_ready()


@pytest.mark.parametrize("asker", [0, 1])
def test_input_is_asked_of_the_client_that_ran_the_cell(kernel: Kernel, asker: int) -> None:
    clients = [kernel.client, kernel.connect()]
    request = clients[asker].execute("print(input('name? '))", allow_stdin=True)
    question = clients[asker].get_stdin_msg(timeout=10)
    assert question["content"]["prompt"] == "name? "
    assert not clients[1 - asker].stdin_channel.msg_ready()
    clients[asker].input("Ada")
    assert collect(clients[asker], request).stdout == "Ada\n"


def test_the_agent_is_told_that_a_cell_waits_for_input(kernel: Kernel, agent: StandInAgent) -> None:
    request = kernel.client.execute("input()", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=10)
    with agent.changed:
        assert agent.changed.wait_for(lambda: agent.only.reports[-1]["waiting_for_input"], 10)
    kernel.client.input("x")
    collect(kernel.client, request)
    with agent.changed:
        idle = {"execution_state": "idle", "queued": 0, "waiting_for_input": False}
        assert agent.changed.wait_for(lambda: idle.items() <= agent.only.reports[-1].items(), 10)


def test_only_real_messages_count_as_activity(kernel: Kernel, agent: StandInAgent) -> None:
    run(kernel.client, "pass")
    with agent.changed:
        assert agent.changed.wait_for(lambda: agent.only.reports[-1]["last_message"] > 0, 10)
        before = agent.only.reports[-1]["last_message"]
    assert abs(before - time.time()) < 60
    kernel.connect().comm_info()
    kernel.client.kernel_info()
    send(kernel.client, "control", "usage_request", {})
    send(kernel.client, "shell", "comm_msg", {"comm_id": "x", "data": {"method": "request_state"}})
    with agent.changed:
        count = len(agent.only.reports)
        assert agent.changed.wait_for(lambda: len(agent.only.reports) > count + 1, 15)
    assert agent.only.reports[-1]["last_message"] == before


def test_an_interrupt_reaches_the_cell(kernel: Kernel) -> None:
    request = kernel.client.execute("print('started', flush=True)\nimport time\ntime.sleep(60)")
    while kernel.client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
        pass
    kernel.manager.interrupt_kernel()
    assert collect(kernel.client, request).reply["content"]["ename"] == "KeyboardInterrupt"


def test_an_interrupt_message_reaches_the_cell(kernel: Kernel) -> None:
    request = kernel.client.execute("print('started', flush=True)\nimport time\ntime.sleep(60)")
    while kernel.client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
        pass
    send(kernel.client, "control", "interrupt_request", {})
    assert collect(kernel.client, request).reply["content"]["ename"] == "KeyboardInterrupt"


def test_restart_gives_a_fresh_kernel_on_the_same_ports(kernel: Kernel, agent: StandInAgent) -> None:
    run(kernel.client, "kept = 1")
    ports = kernel.manager.ports
    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=60)
    assert kernel.manager.ports == ports
    assert run(kernel.client, "'kept' in globals()").result == "False"
    assert [session.state for session in agent.sessions.values()] == ["ended", "running"]


def test_a_forced_restart_gives_a_fresh_kernel_too(kernel: Kernel, agent: StandInAgent) -> None:
    run(kernel.client, "kept = 1")
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    assert run(kernel.client, "'kept' in globals()").result == "False"
    assert [session.state for session in agent.sessions.values()] == ["ended", "running"]


def test_a_kernel_that_is_interrupted_and_then_killed_was_not_wanted(kernel: Kernel, agent: StandInAgent) -> None:
    """As Jupyter does with a kernel that is to be killed, when the provisioner is another one."""
    run(kernel.client, "kept = 1")
    relay = kernel.manager.provisioner.process
    relay.send_signal(signal.SIGINT)
    (note,) = agent.home.glob("jupyter_runtime_dir/*.torpor/relay.json")
    eventually(lambda: json.loads(note.read_text() or "{}").get("interrupted"), bool)
    relay.kill()
    relay.wait()
    kernel.manager.start_kernel()
    kernel.client.wait_for_ready(timeout=60)
    assert run(kernel.client, "'kept' in globals()").result == "False"
    assert [session.state for session in agent.sessions.values()] == ["ended", "running"]


def test_shutdown_ends_kernel_and_relay(kernel: Kernel, agent: StandInAgent) -> None:
    relay = kernel.manager.provisioner.process
    kernel.manager.shutdown_kernel()
    assert relay.wait(10) == 0
    assert agent.only.state == "ended"
    assert list(agent.home.glob("jupyter_runtime_dir/*")) == []


def test_shutdown_is_confirmed_to_the_client(kernel: Kernel, agent: StandInAgent) -> None:
    request = kernel.client.shutdown()
    reply = kernel.client.get_control_msg(timeout=10)
    assert (reply["msg_type"], reply["parent_header"]["msg_id"]) == ("shutdown_reply", request)
    agent.wait_for(agent.only, "ended")


def test_a_kernel_that_dies_is_dead(kernel: Kernel, agent: StandInAgent) -> None:
    relay = kernel.manager.provisioner.process
    kernel.client.execute("import os; os._exit(7)")
    assert relay.wait(10) == 7
    assert not kernel.manager.is_alive()


def test_a_kernel_that_is_killed_is_dead(kernel: Kernel, agent: StandInAgent) -> None:
    os.killpg(agent.only.process.pid, signal.SIGKILL)
    assert kernel.manager.provisioner.process.wait(10) == 128 + signal.SIGKILL


def test_sigterm_ends_the_session(kernel: Kernel, agent: StandInAgent) -> None:
    relay = kernel.manager.provisioner.process
    relay.terminate()
    assert relay.wait(10) == 128 + signal.SIGTERM
    assert agent.only.state == "ended"


def test_large_outputs_arrive_whole(kernel: Kernel) -> None:
    code = "from IPython.display import display\ndisplay({'application/x-large': 'x' * 100_000_000}, raw=True)"
    answer = run(kernel.client, code)
    (display,) = [m for m in answer.published if m["msg_type"] == "display_data"]
    assert display["content"]["data"]["application/x-large"] == "x" * 100_000_000


def test_many_lines_arrive_in_order(kernel: Kernel) -> None:
    answer = run(kernel.client, "for number in range(20000): print(number, flush=number % 10 == 0)")
    assert answer.stdout == "".join(f"{number}\n" for number in range(20000))


def test_heartbeats_are_answered_while_a_cell_holds_the_kernel(kernel: Kernel) -> None:
    kernel.client.hb_channel.unpause()
    run(kernel.client, "import time\nfor _ in range(3): time.sleep(0.5)")
    assert kernel.client.is_alive()
    assert kernel.client.hb_channel.is_beating()


def test_connect_request_names_the_ports_that_clients_use(kernel: Kernel) -> None:
    answer = collect(kernel.client, send(kernel.client, "shell", "connect_request", {}))
    assert answer.reply["content"]["shell_port"] == kernel.manager.shell_port


def test_unsigned_messages_are_dropped(kernel: Kernel) -> None:
    stranger = kernel.connect(wait=False)
    stranger.session.key = b"another key"
    request = stranger.execute("broken = True")
    answer = run(kernel.client, "'broken' in globals()")
    assert answer.result == "False"
    assert request not in [m["parent_header"].get("msg_id") for m in answer.published]


def test_a_subscriber_is_welcomed_as_the_kernel_does(kernel: Kernel) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(kernel.manager._make_url("iopub"))
        assert socket.poll(10_000)
        _, frames = kernel.client.session.feed_identities(socket.recv_multipart())
        welcome = kernel.client.session.deserialize(frames)
        assert (welcome["msg_type"], welcome["content"]) == ("iopub_welcome", {"subscription": ""})
    finally:
        context.destroy(linger=0)


def test_an_asyncio_client(kernel: Kernel) -> None:
    async def talk() -> str:
        client = AsyncKernelClient()
        client.load_connection_info(kernel.manager.get_connection_info())
        client.start_channels()
        await client.wait_for_ready(timeout=60)
        request = client.execute("print('async')")
        text = ""
        while True:
            message = await client.get_iopub_msg(timeout=10)
            if message["parent_header"].get("msg_id") == request:
                text += message["content"].get("text", "")
                if message["content"].get("execution_state") == "idle":
                    break
        client.stop_channels()
        return text

    assert asyncio.run(talk()) == "async\n"


def test_a_command_that_cannot_start_says_why(
    agent: StandInAgent, torpor_by_default: None, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel = Kernel()
    kernel.manager.kernel_spec.argv = ["python", "-c", "raise SystemExit('no such kernel')", "{connection_file}"]
    kernel.manager.start_kernel()
    assert kernel.manager.provisioner.process.wait(20) == 1
    kernel.close()
    assert "no such kernel" in capfd.readouterr().err


def test_without_an_agent_it_says_so(home: object, torpor_by_default: None, capfd: pytest.CaptureFixture[str]) -> None:
    kernel = Kernel()
    kernel.manager.start_kernel()
    assert kernel.manager.provisioner.process.wait(20) == 11
    kernel.close()
    assert "torpor up" in capfd.readouterr().err


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("encryption", ["disabled", "required"])
def test_transports_and_encryption(
    agent: StandInAgent, torpor_by_default: None, transport: str, encryption: str
) -> None:
    kernel = Kernel(transport=transport, transport_encryption=encryption)
    kernel.manager.kernel_spec.metadata["supported_encryption"] = "curve"
    try:
        client = kernel.start()
        assert (kernel.manager.curve_publickey is not None) == (encryption == "required")
        request = client.execute("print(input())", allow_stdin=True)
        client.get_stdin_msg(timeout=10)
        client.input("secret")
        assert collect(client, request).stdout == "secret\n"
        assert client.is_alive()
        kernel.manager.restart_kernel()
        client.wait_for_ready(timeout=60)
        assert run(client, "1 + 1").result == "2"
    finally:
        kernel.close()
