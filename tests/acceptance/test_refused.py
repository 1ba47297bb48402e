"""What cannot be saved is named before anything is touched."""

from __future__ import annotations

import json

import pytest
from tests.acceptance.traces import assert_as_before, traces
from tests.installation import PYTHON, Installation

from torpor.errors import PreflightRefused

RING = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 8, ctypes.create_string_buffer(120))
assert ring >= 0, os.strerror(ctypes.get_errno())
"""
SEMAPHORE = "import os; counter = os.eventfd(1, os.EFD_SEMAPHORE)"
NESTED = "import subprocess; child = subprocess.Popen(['unshare', '--net', 'sleep', '1000'])"
DEBUGGED = """
import ctypes, os, signal, time
child = os.fork()
if child == 0:
    while True: time.sleep(1)
assert ctypes.CDLL(None).ptrace(0x4206, child, None, None) == 0
"""
COUNT = """
import time
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.02)
"""
REFUSALS = {
    "an io_uring ring": RING,
    "an eventfd in semaphore mode": SEMAPHORE,
    "in a net namespace of its own": NESTED,
    "is being debugged by process": DEBUGGED,
}


@pytest.mark.parametrize("kind", ["checkpoint", "hibernate"])
@pytest.mark.parametrize("named", REFUSALS)
def test_what_cannot_be_saved_is_named_and_nothing_is_touched(
    shared_agent: Installation, named: str, kind: str
) -> None:
    session = shared_agent.run(PYTHON, "-c", REFUSALS[named] + COUNT)
    shared_agent.wait_for_output(session["id"], "3\n")
    pids = shared_agent.client.session(session["id"])["pids"]
    before = traces(shared_agent)
    with pytest.raises(PreflightRefused, match=named) as refused:
        shared_agent.operate(session["id"], kind)
    assert "Nothing was touched" in refused.value.safe
    found = shared_agent.client.session(session["id"])
    assert (found["state"], found["pids"], found["checkpoints"]) == ("running", pids, [])
    here = shared_agent.output(session["id"]).count("\n")
    shared_agent.wait_for_output(session["id"], f"\n{here + 3}\n")
    assert_as_before(shared_agent, before)
    shared_agent.client.remove(session["id"], force=True)


def test_the_command_says_so(shared_agent: Installation) -> None:
    shared_agent.run(PYTHON, "-c", RING + COUNT, name="ring")
    shared_agent.wait_for_output("ring", "1\n")
    refused = shared_agent.torpor("hibernate", "ring", "--json")
    assert refused.returncode == 6
    assert "io_uring" in refused.stdout + refused.stderr
    assert shared_agent.client.session("ring")["error"]["code"] == "preflight"
    assert json.loads(shared_agent.torpor("show", "ring", "--json").stdout)["state"] == "running"
    shared_agent.client.remove("ring", force=True)
