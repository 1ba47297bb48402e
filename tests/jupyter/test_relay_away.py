"""While the kernel is away: what is answered from memory, what waits, what wakes, and that nothing is lost."""

from __future__ import annotations

import json
import time

import pytest
from tests.jupyter.conftest import Kernel
from tests.jupyter.standin import StandInAgent
from tests.jupyter.talk import collect, is_silent, run, send

from torpor.errors import Conflict, StoreError


@pytest.fixture
def asleep(kernel: Kernel, agent: StandInAgent) -> Kernel:
    run(kernel.client, "x = 41")
    agent.hibernate(agent.only)
    return kernel


def test_a_cell_wakes_the_kernel(asleep: Kernel, agent: StandInAgent) -> None:
    answer = run(asleep.client, "print('awake'); x + 1")
    assert (answer.stdout, answer.result) == ("awake\n", "42")
    with agent.changed:
        assert agent.changed.wait_for(lambda: agent.only.answered == agent.only.version, 10)
    assert agent.only.calls.count("resume") == 1


def test_kernel_info_is_answered_without_waking(asleep: Kernel, agent: StandInAgent) -> None:
    answer = collect(asleep.client, asleep.client.kernel_info())
    assert answer.reply["content"]["implementation"] == "ipython"
    assert answer.kinds == ["status", "status"]
    assert agent.only.state == "hibernated"


def test_a_new_client_connects_without_waking(asleep: Kernel, agent: StandInAgent) -> None:
    newcomer = asleep.connect()
    assert newcomer.is_alive()
    assert agent.only.state == "hibernated"
    assert run(newcomer, "x").result == "41"


def test_comm_info_is_what_the_kernel_had(kernel: Kernel, agent: StandInAgent) -> None:
    run(kernel.client, "from comm import create_comm\none, two = create_comm('a'), create_comm('b')")
    known = collect(kernel.client, kernel.client.comm_info()).reply["content"]["comms"]
    agent.hibernate(agent.only)
    assert collect(kernel.client, kernel.client.comm_info()).reply["content"]["comms"] == known
    only_a = collect(kernel.client, kernel.client.comm_info("a")).reply["content"]["comms"]
    assert list(only_a.values()) == [{"target_name": "a"}]
    assert agent.only.state == "hibernated"


@pytest.mark.parametrize(
    ("channel", "msg_type", "content"),
    [
        ("shell", "comm_open", {"comm_id": "c", "target_name": "jupyter.widget.control", "data": {}}),
        ("shell", "comm_msg", {"comm_id": "w", "data": {"method": "request_state"}}),
        ("shell", "comm_msg", {"comm_id": "c", "data": {"method": "request_states"}}),
        ("control", "debug_request", {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}}),
        ("control", "usage_request", {}),
        ("control", "list_subshell_request", {}),
        ("shell", "connect_request", {}),
        ("shell", "history_request", {"hist_access_type": "tail", "n": 10, "output": False, "raw": True}),
    ],
)
def test_these_do_not_wake(
    asleep: Kernel, agent: StandInAgent, channel: str, msg_type: str, content: dict[str, object]
) -> None:
    send(asleep.client, channel, msg_type, content)
    collect(asleep.client, asleep.client.kernel_info())  # behind it on the same way
    assert agent.only.state == "hibernated"
    assert "resume" not in agent.only.calls
    assert run(asleep.client, "x").result == "41"


@pytest.mark.parametrize(
    ("msg_type", "content"),
    [
        ("complete_request", {"code": "pri", "cursor_pos": 3}),
        ("inspect_request", {"code": "print", "cursor_pos": 5, "detail_level": 0}),
        ("history_request", {"hist_access_type": "search", "pattern": "x*", "output": False, "raw": True}),
        ("is_complete_request", {"code": "1"}),
    ],
)
def test_these_wake_and_are_answered(
    asleep: Kernel, agent: StandInAgent, msg_type: str, content: dict[str, object]
) -> None:
    answer = collect(asleep.client, send(asleep.client, "shell", msg_type, content))
    assert answer.reply["msg_type"] == msg_type.replace("request", "reply")
    assert agent.only.state == "running"


def test_a_widgets_message_wakes(asleep: Kernel, agent: StandInAgent) -> None:
    send(asleep.client, "shell", "comm_msg", {"comm_id": "w", "data": {"method": "update", "state": {"value": 3}}})
    agent.wait_for(agent.only, "running")


def test_heartbeats_go_on(asleep: Kernel, agent: StandInAgent) -> None:
    asleep.client.hb_channel.unpause()
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        assert asleep.client.hb_channel.is_beating()
        time.sleep(0.1)
    assert asleep.manager.is_alive()
    assert agent.only.state == "hibernated"


def test_held_messages_keep_their_order(asleep: Kernel, agent: StandInAgent) -> None:
    agent.resume_gate.clear()
    requests = [asleep.client.execute(f"print({n}); order = [*globals().get('order', []), {n}]") for n in range(20)]
    other = asleep.connect()
    more = other.execute("order.append('other')")
    agent.wait_for(agent.only, "resuming")
    agent.resume_gate.set()
    for number, request in enumerate(requests):
        answer = collect(asleep.client, request)
        assert (answer.status, answer.stdout) == ("ok", f"{number}\n")
    collect(other, more)
    assert run(asleep.client, "order").result == str([*range(20), "other"])


def test_every_line_and_reply_of_100_wakes(kernel: Kernel, agent: StandInAgent) -> None:
    lines = "".join(f"line {number}\n" for number in range(30))
    for cycle in range(100):
        agent.hibernate(agent.only)
        answer = run(kernel.client, f"for number in range(30): print('line', number, flush=True)\n{cycle}")
        assert (answer.status, answer.stdout, answer.result) == ("ok", lines, str(cycle))


def test_input_works_after_waking(asleep: Kernel) -> None:
    request = asleep.client.execute("print(input('? '))", allow_stdin=True)
    asleep.client.get_stdin_msg(timeout=20)
    asleep.client.input("here")
    assert collect(asleep.client, request).stdout == "here\n"


def test_a_cell_that_waits_says_so_and_clears_it(asleep: Kernel, agent: StandInAgent) -> None:
    agent.progress = [{"phase": "memory", "done": 300_000_000, "total": 1_200_000_000}]
    agent.resume_gate.clear()
    request = asleep.client.execute("print('done')")
    seen = []
    while "update_display_data" not in seen and "display_data" not in seen:
        message = asleep.client.get_iopub_msg(timeout=10)
        assert message["parent_header"]["msg_id"] == request
        seen.append(message["msg_type"])
    text = message["content"]["data"]["text/plain"]
    assert "Waking" in text
    assert "1.20 GB, 25 %" in text
    agent.resume_gate.set()
    answer = collect(asleep.client, request)
    kinds = answer.kinds
    assert kinds.index("clear_output") < kinds.index("execute_input") < kinds.index("stream")
    assert answer.published[kinds.index("clear_output")]["content"] == {"wait": False}
    assert answer.stdout == "done\n"


def test_a_quick_wake_and_a_silent_request_show_nothing(asleep: Kernel, agent: StandInAgent) -> None:
    agent.resume_gate.clear()
    request = asleep.client.execute("x", silent=True)
    agent.wait_for(agent.only, "resuming")
    assert is_silent(asleep.client, 1.0)
    agent.resume_gate.set()
    assert "display_data" not in collect(asleep.client, request).kinds
    agent.hibernate(agent.only)
    assert "display_data" not in run(asleep.client, "x").kinds


def test_an_interrupt_cancels_held_cells(asleep: Kernel, agent: StandInAgent) -> None:
    agent.resume_gate.clear()
    first, second = asleep.client.execute("x = 'first'"), asleep.client.execute("x = 'second'")
    completion = asleep.client.complete("pri", 3)
    agent.wait_for(agent.only, "resuming")
    asleep.manager.interrupt_kernel()
    answer = collect(asleep.client, first)
    assert answer.reply["content"]["ename"] == "KeyboardInterrupt"
    assert "error" in answer.kinds
    assert collect(asleep.client, second).status == "aborted"
    agent.resume_gate.set()
    assert collect(asleep.client, completion).status == "ok"
    assert run(asleep.client, "x").result == "41"


def test_an_interrupt_message_is_answered_without_waking(asleep: Kernel, agent: StandInAgent) -> None:
    answer = collect(asleep.client, send(asleep.client, "control", "interrupt_request", {}), "control")
    assert answer.status == "ok"
    assert agent.only.state == "hibernated"


def test_shutdown_does_not_wake(asleep: Kernel, agent: StandInAgent) -> None:
    relay = asleep.manager.provisioner.process
    asleep.manager.shutdown_kernel()
    assert relay.wait(10) == 0
    assert agent.only.state == "ended"
    assert "resume" not in agent.only.calls


def test_restart_does_not_wake(asleep: Kernel, agent: StandInAgent) -> None:
    asleep.manager.restart_kernel()
    asleep.client.wait_for_ready(timeout=60)
    assert run(asleep.client, "'x' in globals()").result == "False"
    first, second = agent.sessions.values()
    assert (first.state, second.state) == ("ended", "running")
    assert "resume" not in first.calls


def test_a_wake_that_fails_is_told_to_the_cell(asleep: Kernel, agent: StandInAgent) -> None:
    agent.resume_error = StoreError("The store cannot be read.", safe="The checkpoint is kept.")
    answer = run(asleep.client, "x")
    assert answer.status == "error"
    assert "The store cannot be read. The checkpoint is kept." in answer.reply["content"]["evalue"]
    assert "error" in answer.kinds
    agent.resume_error = None
    assert run(asleep.client, "x").result == "41"


def test_unsigned_messages_do_not_wake(asleep: Kernel, agent: StandInAgent) -> None:
    stranger = asleep.connect(wait=False)
    stranger.session.key = b"another key"
    stranger.execute("x = 0")
    collect(asleep.client, asleep.client.kernel_info())
    assert agent.only.state == "hibernated"
    assert run(asleep.client, "x").result == "41"


def test_a_busy_kernel_is_not_hibernated_where_only_an_idle_one_shall_be(kernel: Kernel, agent: StandInAgent) -> None:
    request = kernel.client.execute("print('started', flush=True)\nimport time\ntime.sleep(2)\n'ended'")
    while kernel.client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
        pass
    with pytest.raises(Conflict, match="busy"):
        agent.hibernate(agent.only, if_idle=True)
    assert collect(kernel.client, request).result == "'ended'"
    agent.hibernate(agent.only)


def test_a_kernel_that_waits_for_input_is_not_idle(kernel: Kernel, agent: StandInAgent) -> None:
    request = kernel.client.execute("input()", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=10)
    with pytest.raises(Conflict, match="input"):
        agent.hibernate(agent.only, if_idle=True)
    kernel.client.input("x")
    assert collect(kernel.client, request).result == "'x'"


def test_the_agent_may_be_restarted(kernel: Kernel, agent: StandInAgent) -> None:
    run(kernel.client, "x = 41")
    agent.go_away()
    assert run(kernel.client, "x").result == "41"
    agent.start()
    agent.hibernate(agent.only)
    assert run(kernel.client, "x").result == "41"


def test_a_cell_waits_for_an_agent_that_is_restarted(asleep: Kernel, agent: StandInAgent) -> None:
    agent.go_away()
    request = asleep.client.execute("x")
    while (message := asleep.client.get_iopub_msg(timeout=10))["msg_type"] != "display_data":
        pass
    assert "agent" in message["content"]["data"]["text/plain"]
    agent.start()
    assert collect(asleep.client, request).result == "41"


def test_a_killed_relay_loses_nothing(asleep: Kernel, agent: StandInAgent) -> None:
    asleep.manager.provisioner.process.kill()
    asleep.manager.provisioner.process.wait()
    asleep.manager.start_kernel()
    asleep.client.wait_for_ready(timeout=30)
    assert collect(asleep.client, asleep.client.kernel_info()).reply["content"]["implementation"] == "ipython"
    assert agent.only.state == "hibernated"
    assert run(asleep.client, "x").result == "41"


def test_a_killed_relay_of_a_running_kernel_is_followed_by_another(kernel: Kernel, agent: StandInAgent) -> None:
    run(kernel.client, "x = 41")
    kernel.manager.provisioner.process.kill()
    kernel.manager.provisioner.process.wait()
    kernel.manager.start_kernel()
    kernel.client.wait_for_ready(timeout=30)
    assert run(kernel.client, "x").result == "41"
    assert len(agent.sessions) == 1


def test_a_relay_that_takes_over_knows_that_the_kernel_is_busy(kernel: Kernel, agent: StandInAgent) -> None:
    flag = agent.home / "go-on"
    kernel.client.execute(
        f"import os, time\nprint('started')\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    )
    while kernel.client.get_iopub_msg(timeout=10)["msg_type"] != "stream":
        pass
    kernel.manager.provisioner.process.kill()
    kernel.manager.provisioner.process.wait()
    count = len(agent.only.reports)
    kernel.manager.start_kernel()
    with agent.changed:
        assert agent.changed.wait_for(
            lambda: [report["execution_state"] for report in agent.only.reports[count:]][-1:] == ["busy"], 20
        )
        flag.touch()
        assert agent.changed.wait_for(lambda: agent.only.reports[-1]["execution_state"] == "idle", 20)


def test_the_way_to_the_inner_half_is_private_and_apart(kernel: Kernel, agent: StandInAgent) -> None:
    (path,) = agent.home.glob("jupyter_runtime_dir/*.torpor/inner")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    ip, port, _secret, prefix, *_ = path.read_text().split("\n")
    assert is_apart(kernel, ip, int(port))
    told = json.loads(path.with_name("kernel.json").read_text())
    assert (told["transport"], told["ip"]) == ("ipc", prefix)
    assert told["key"] == kernel.manager.session.key.decode()


def test_the_inner_connection_of_a_tcp_kernel_is_private_and_apart(
    agent: StandInAgent, torpor_by_default: None
) -> None:
    kernel = Kernel()
    kernel.manager.kernel_spec.metadata["torpor"] = {"transport": "tcp"}
    kernel.start()
    (path,) = agent.home.glob("jupyter_runtime_dir/*.torpor/kernel.json")
    assert path.stat().st_mode & 0o777 == 0o600
    inner = json.loads(path.read_text())
    assert inner["key"] == kernel.manager.session.key.decode()
    for channel in ("shell", "iopub", "stdin", "control", "hb"):
        assert is_apart(kernel, inner["ip"], inner[f"{channel}_port"])
    kernel.close()


def is_apart(kernel: Kernel, ip: str, port: int) -> bool:
    """Whether this is a loopback address of its own, on a port that nobody is given by chance."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    return ip.startswith("127.") and ip != kernel.manager.ip and port < lowest


def test_the_kernels_environment_names_no_parent(kernel: Kernel) -> None:
    assert run(kernel.client, "import os; 'JPY_PARENT_PID' in os.environ").result == "False"
