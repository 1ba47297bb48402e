"""With the kernel awake, everything is as without Torpor."""

from __future__ import annotations

from tests.jupyter.conftest import Kernel
from tests.jupyter.talk import run


def test_runs_cells(kernel: Kernel) -> None:
    answer = run(kernel.client, "print('hello'); 6 * 7")
    assert answer.status == "ok"
    assert answer.stdout == "hello\n"
    assert answer.result == "42"
    assert answer.kinds == ["status", "execute_input", "stream", "execute_result", "status"]
