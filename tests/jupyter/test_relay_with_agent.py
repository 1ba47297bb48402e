"""The relay with the real agent: kernels are saved by CRIU, their processes end, and the next cell brings them back."""

from __future__ import annotations

from typing import Any

import pytest
from tests.installation import Installation, eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.talk import run

from torpor.errors import Conflict


def session_of(installation: Installation) -> dict[str, Any]:
    (session,) = [session for session in installation.client.sessions() if session["kind"] == "kernel"]
    return session


def hibernate(installation: Installation) -> dict[str, Any]:
    """Saves the kernel as soon as the agent knows that its cell has ended."""
    session = session_of(installation)["id"]

    def is_saved() -> bool:
        try:
            installation.operate(session, "hibernate")
        except Conflict:
            return False
        return True

    eventually(is_saved, bool)
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
