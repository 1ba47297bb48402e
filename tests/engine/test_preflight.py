"""The look at a tree before it is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from torpor.engine import preflight

BUSY_WITH_CHILDREN = """
import os
print("up", flush=True)
while True:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_processes_that_come_and_go_are_nothing_to_fail_of() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY_WITH_CHILDREN], stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        try:
            for _ in range(3000):
                assert preflight.objections(parent.pid) == []
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
