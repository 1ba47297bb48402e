"""A whole Jupyter server that was running before Torpor came, with a kernel and a variable in it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adopt.programs import Program
from tests.installation import Installation, eventually

from torpor.demo.lab import Lab, find_server, new_token
from torpor.engine import procfs
from torpor.errors import PreflightRefused, TorporError

Start = Callable[..., Program]
CELL = """
import numpy
from multiprocessing import Process, shared_memory
value = numpy.arange(100_000)
shared = shared_memory.SharedMemory(create=True, size=4096)
shared.buf[:4] = b"here"
"""


class Server:
    """One server, with its settings and its runtime files in its own folder."""

    def __init__(self, start: Start, folder: Path) -> None:
        token = new_token()
        places = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")
        for place in places:
            (folder / place).mkdir(mode=0o700)
        settings = {"ip": "127.0.0.1", "port": "0", "root_dir": str(folder)}
        self.program = start(
            *(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"),
            *(f"--ServerApp.{name}={value}" for name, value in settings.items()),
            env={
                "JUPYTER_TOKEN": token,
                "PATH": os.environ["PATH"],
                **{place: str(folder / place) for place in places},
            },
        )
        found = eventually(lambda: find_server(folder / "JUPYTER_RUNTIME_DIR", token), lambda lab: lab is not None)
        assert isinstance(found, Lab)
        self.lab = found

    def run(self, kernel: str, code: str) -> str:
        """One cell, by a client that connects anew, as a page does that has lost its connection."""
        with self.lab.connect(kernel) as notebook:
            return notebook.run(code).printed

    def answers(self) -> bool:
        with contextlib.suppress(TorporError):
            return bool(self.lab.kernel_state(self.kernel))
        return False

    kernel = ""


@pytest.fixture
def server(start: Start, tmp_path: Path) -> Server:
    return Server(start, tmp_path)


def test_a_server_comes_back_with_its_kernel(agent: Installation, server: Server) -> None:
    kernel = server.kernel = server.lab.open_notebook("one.ipynb")
    server.run(kernel, CELL)
    (kernel_pid,) = [
        pid for pid in procfs.tree(server.program.pid) if "ipykernel_launcher" in " ".join(procfs.arguments(pid))
    ]
    with pytest.raises(PreflightRefused, match=f"Adopt the whole server: torpor adopt {server.program.pid}"):
        agent.client.adopt(kernel_pid)

    agent.client.adopt(server.program.pid, name="lab")
    for cycle in range(3):
        agent.operate("lab", "hibernate")
        assert not server.answers()
        agent.operate("lab", "resume")
        eventually(server.answers, bool)
        said = server.run(
            kernel, f"value[0] += 1; print(value[0], int(value[1:].sum()), bytes(shared.buf[:4]), {cycle})"
        )
        assert said == f"{cycle + 1} {sum(range(100_000))} b'here' {cycle}\n"
    server.lab.shut_down(kernel)
    other = server.lab.open_notebook("two.ipynb")
    assert server.run(other, "print(6 * 7)") == "42\n"
    assert agent.client.end("lab", keep=False)["state"] == "ended"
