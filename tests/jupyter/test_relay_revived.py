"""A kernel that died goes on from its last checkpoint, where the policy says so, and its user is told what is lost."""

from __future__ import annotations

import os
import signal

import pytest
from tests.installation import Installation, eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.talk import Answer, run
from tests.jupyter.test_relay_with_agent import session_of


def said(answer: Answer, stream: str) -> str:
    """What came on stdout, or on stderr."""
    found = [message["content"] for message in answer.published if message["msg_type"] == "stream"]
    return "".join(content["text"] for content in found if content["name"] == stream)


@pytest.fixture
def kernel_that_comes_back(installation: Installation, torpor_by_default: None) -> Kernel:
    installation.paths.config.write_text('[policy]\non_failure = "resume"\n')
    kernel = Kernel()
    kernel.start()
    run(kernel.client, "import os, signal; x = 41")
    installation.operate(session_of(installation)["id"], "checkpoint")
    assert run(kernel.client, "x = 0; x").result == "0"
    return kernel


def test_the_cell_that_was_lost_is_answered_and_the_next_one_says_what_else(
    kernel_that_comes_back: Kernel, installation: Installation
) -> None:
    kernel = kernel_that_comes_back
    died = run(kernel.client, "os.kill(os.getpid(), signal.SIGKILL)")
    assert died.reply["content"]["ename"] == "SessionInterrupted"
    assert (
        "The kernel died, and goes on from its last checkpoint. What it did in the" in died.reply["content"]["evalue"]
    )
    answer = run(kernel.client, "print(x)")
    assert said(answer, "stdout") == "41\n"
    assert "Run again what came after that." in said(answer, "stderr")
    assert said(run(kernel.client, "print(x)"), "stderr") == ""
    assert "is lost" in installation.torpor("show", session_of(installation)["id"]).stdout
    assert kernel.manager.is_alive()
    kernel.close()


def test_a_kernel_that_died_between_cells(kernel_that_comes_back: Kernel, installation: Installation) -> None:
    kernel = kernel_that_comes_back
    session = session_of(installation)
    os.kill(session["pids"][1], signal.SIGKILL)
    eventually(lambda: session_of(installation), lambda now: now["lost"] is not None and now["state"] == "running")
    answer = run(kernel.client, "print(x)")
    assert said(answer, "stdout") == "41\n"
    assert "Run again what came after that." in said(answer, "stderr")
    installation.operate(session["id"], "hibernate")
    answer = run(kernel.client, "print(x + 1)")
    assert (said(answer, "stdout"), said(answer, "stderr")) == ("42\n", "")
    kernel.close()


def test_jupyter_is_left_to_start_another_where_the_policy_does_not_say_so(
    kernel_that_comes_back: Kernel, installation: Installation
) -> None:
    installation.paths.config.write_text('[policy]\non_failure = "none"\n')
    kernel = kernel_that_comes_back
    kernel.client.execute("os.kill(os.getpid(), signal.SIGKILL)")
    eventually(kernel.manager.is_alive, lambda alive: not alive)
    assert session_of(installation)["state"] == "failed"
    kernel.close()
