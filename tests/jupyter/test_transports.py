"""Kernels that do not know Jupyter's ipc transport, or know it in their own way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.installation import Installation, eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.standin import StandInAgent
from tests.jupyter.talk import collect, run

from torpor.errors import Conflict

SCRIPT = str(Path(__file__).with_name("kernels.py"))


def kernel_of(kind: str) -> Kernel:
    kernel = Kernel()
    kernel.manager.kernel_spec.argv = [sys.executable, SCRIPT, kind, "-f", "{connection_file}"]
    return kernel


@pytest.fixture
def tcp_only(agent: StandInAgent, torpor_by_default: None) -> Iterator[Kernel]:
    kernel = kernel_of("tcp")
    yield kernel
    kernel.close()


def test_a_kernel_that_knows_tcp_only_is_started_with_it(
    tcp_only: Kernel, agent: StandInAgent, capfd: pytest.CaptureFixture[str]
) -> None:
    client = tcp_only.connect_early()
    request = client.execute("6 * 7")  # it waits for the kernel, however often that is started
    assert collect(client, request).result == "42"
    assert agent.only.state == "running"
    with agent.changed:
        assert agent.changed.wait_for(lambda: agent.only.reports and not agent.only.reports[-1]["lossless"], 20)
    assert "quiet moments" in capfd.readouterr().err


def test_the_wish_for_ipc_alone_is_kept(
    tcp_only: Kernel, agent: StandInAgent, capfd: pytest.CaptureFixture[str]
) -> None:
    tcp_only.manager.kernel_spec.metadata["torpor"] = {"transport": "ipc"}
    tcp_only.manager.start_kernel()
    assert tcp_only.manager.provisioner.process.wait(60) == 1
    assert agent.only.state == "failed"
    assert "does not know the transport ipc" in capfd.readouterr().err


def test_the_next_relay_of_a_tcp_kernel_finds_it(tcp_only: Kernel, agent: StandInAgent) -> None:
    client = tcp_only.start()
    run(client, "x = 41")
    tcp_only.manager.provisioner.process.kill()
    tcp_only.manager.provisioner.process.wait()
    tcp_only.manager.start_kernel()
    client.wait_for_ready(timeout=60)
    assert run(client, "x + 1").result == "42"
    assert agent.only.state == "running"


def test_a_kernel_that_names_its_sockets_with_a_colon_is_found(agent: StandInAgent, torpor_by_default: None) -> None:
    kernel = kernel_of("colon")
    try:
        client = kernel.start()
        request = client.execute("print(input())", allow_stdin=True)
        client.get_stdin_msg(timeout=60)
        client.input("found")
        assert collect(client, request).stdout == "found\n"
        assert agent.only.reports[-1]["lossless"]
    finally:
        kernel.close()


def test_it_is_saved_at_quiet_moments_only_and_says_so(installation: Installation, torpor_by_default: None) -> None:
    kernel = kernel_of("tcp")
    try:
        client = kernel.start()
        (session,) = [
            one["id"]
            for one in installation.client.sessions()
            if one["labels"].get("jupyter.connection_file") == kernel.manager.connection_file
        ]
        assert installation.client.session(session)["state"] == "running"
        request = client.execute("input()", allow_stdin=True)
        client.get_stdin_msg(timeout=60)
        eventually(lambda: (installation.client.session(session)["kernel"] or {}).get("waiting_for_input"), bool)
        with pytest.raises(Conflict, match="TCP only"):
            installation.operate(session, "hibernate")
        assert "TCP only" in eventually(lambda: installation.torpor("why", session).stdout, lambda told: "TCP" in told)
        client.input("x")
        assert collect(client, request).result == "'x'"
        eventually(lambda: installation.client.session(session)["kernel"]["execution_state"], "idle".__eq__)
        installation.operate(session, "hibernate")
        assert run(client, "6 * 7").result == "42"
    finally:
        kernel.close()
