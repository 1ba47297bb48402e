"""A whole tmux server, with a shell at work in it, that somebody detached from."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.installation import Installation, eventually

from torpor.engine import procfs
from torpor.errors import PreflightRefused

COUNT = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.1; done"


class Tmux:
    """One server on a socket of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torpor-tmux-"))
        self._clients: list[subprocess.Popen[bytes]] = []
        self.tell("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "50", "bash --norc")
        self.pid = int(self.tell("display", "-p", "#{pid}"))

    def tell(self, *command: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self.folder / "socket"), *command],
            env={**os.environ, "TERM": "xterm", "TMUX": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def numbers(self) -> list[int]:
        """What the counter in its window has printed, as far as the window shows it."""
        lines = self.tell("capture-pane", "-p").splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("line ")]

    def attach(self) -> tuple[subprocess.Popen[bytes], int]:
        """A client on a terminal; the terminal's other end."""
        master, slave = pty.openpty()
        client = subprocess.Popen(
            ["tmux", "-S", str(self.folder / "socket"), "attach"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "TMUX": ""},
            start_new_session=True,
        )
        os.close(slave)
        self._clients.append(client)
        return client, master

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self.folder / "socket"), "kill-server"], check=False, capture_output=True)
        for client in self._clients:
            client.kill()
            client.wait()
        shutil.rmtree(self.folder)


@pytest.fixture
def tmux() -> Iterator[Tmux]:
    made = Tmux()
    yield made
    made.close()


def count_on(tmux: Tmux) -> None:
    """The counter counts on, and left nothing out."""
    seen = tmux.numbers()
    later = eventually(tmux.numbers, lambda now: bool(now) and now[-1] >= (seen[-1] if seen else 0) + 3)
    assert later == list(range(later[0], later[-1] + 1))


def test_a_tmux_server_comes_back_with_its_windows(agent: Installation, tmux: Tmux) -> None:
    tmux.tell("send-keys", COUNT, "Enter")
    count_on(tmux)
    client, master = tmux.attach()
    eventually(lambda: tmux.tell("list-clients"), bool)
    with pytest.raises(PreflightRefused, match=r"unix socket .* with Process tmux: client"):
        agent.client.adopt(tmux.pid)
    tmux.tell("detach-client")
    client.wait()
    os.close(master)

    session = agent.client.adopt(tmux.pid, name="work")
    assert session["outside"]
    for _ in range(3):
        agent.operate("work", "hibernate")
        agent.operate("work", "resume")
        inner = [procfs.nspid(pid) for pid in agent.client.session("work")["pids"]]
        assert inner[:2] == [1, tmux.pid]
        count_on(tmux)

    client, master = tmux.attach()
    eventually(lambda: tmux.tell("list-clients"), bool)
    tmux.tell("send-keys", "C-c", "")
    tmux.tell("send-keys", "clear; tty; echo n is $n", "Enter")
    eventually(lambda: tmux.tell("capture-pane", "-p"), lambda text: "n is" in text.replace("echo n is", ""))
    tmux.tell("new-window", "sh")
    assert len(tmux.tell("list-windows").splitlines()) == 2
    tmux.tell("kill-server")
    client.wait()
    os.close(master)
    assert agent.wait_for_state("work", "ended", "failed")["exit_status"] == 0
