"""Programs that people run: each started, hibernated, resumed, and asked whether its own state is as it was."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.installation import Installation, eventually
from tests.programs.table import Table

from torpor.errors import PreflightRefused

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PATIENCE = 120.0  # seconds until a program has imported what it needs, on a busy machine


@dataclass(frozen=True)
class Case:
    """One row. `refused`: what preflight names where it is refused, and `why`; `lost`: what it says of lost state."""

    title: str
    argv: tuple[str, ...]
    checked: str
    refused: str = ""
    lost: str = ""
    why: str = ""


def python(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(SCRIPTS / f"{script}.py"), "FOLDER", *arguments)


CASES = {
    "torch": Case(
        "PyTorch, DataLoader workers",
        python("torch_loader"),
        "the epoch goes on with the next batch from the same two workers; losses equal those of an undisturbed twin",
    ),
    "joblib": Case(
        "joblib",
        python("joblib_workers"),
        "the same worker processes compute on the same memory-mapped array",
    ),
    "pandas": Case("pandas", python("pandas_frame"), "digest of a frame, a groupby in the making, a generator's state"),
    "sqlite": Case(
        "SQLite, WAL mode",
        python("sqlite_wal"),
        "an open transaction, its lock, and a reader's snapshot; then a commit and an integrity check",
    ),
    "memmap": Case("NumPy, memory-mapped file", python("numpy_memmap"), "views, and writes that reach the file"),
    "hdf5": Case("HDF5 (h5py)", python("hdf5"), "a file that is open for writing, and a dataset that grows"),
    "asyncio": Case(
        "asyncio server",
        python("server"),
        "the same port answers, timers and a child go on; connections from outside are closed, and made anew",
    ),
    "uvloop": Case(
        "uvloop server",
        python("server", "uvloop"),
        "as above",
        refused="an io_uring ring",
        why="its libuv polls with an io_uring ring, whatever UV_USE_IO_URING says; the sysctl "
        "kernel.io_uring_disabled = 2 turns that off for the node",
    ),
    "dask-threads": Case(
        "Dask, workers as threads",
        python("dask_cluster", "threads"),
        "scattered data, a finished future, and a new task",
    ),
    "dask": Case(
        "Dask, workers as processes",
        python("dask_cluster", "processes"),
        "as above",
        lost="Cancelled",
        why="Dask's processes are connected by TCP, which a hibernation closes; Dask then drops its workers with their "
        "data and says so (FutureCancelledError). Use workers as threads",
    ),
    "bash": Case(
        "bash with children",
        ("bash", str(SCRIPTS / "children.sh"), "FOLDER"),
        "variables, a trap, a job in the background, a pipeline between children",
    ),
    "r": Case(
        "R",
        ("Rscript", "--vanilla", str(SCRIPTS / "statistics.R"), "FOLDER"),
        "a fitted model, the random number generator, a closure, a file that is open",
    ),
}


def ask(folder: Path, number: int) -> str:
    """The program's answer to its next question."""
    (folder / f"ask-{number}").touch()
    path = folder / f"answer-{number}"
    eventually(path.exists, bool, PATIENCE)
    return path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_as_it_was(shared_agent: Installation, tmp_path: Path, table: Table, name: str) -> None:
    case = CASES[name]
    argv = [str(tmp_path) if word == "FOLDER" else word for word in case.argv]
    started = shared_agent.torpor("run", "-d", "--name", name, "--cwd", str(tmp_path), "--", *argv)
    assert started.returncode == 0, started.stderr
    try:
        assert ask(tmp_path, 0) == "as it was"
        table.add(case.title, taken_through(shared_agent, case, name, tmp_path), case.checked)
    finally:
        print(shared_agent.output(name))
        shared_agent.client.remove(name, force=True)


def taken_through(agent: Installation, case: Case, name: str, folder: Path) -> str:
    """Away and back; what came of it."""
    refusal = refused(agent, name)
    if refusal:
        assert case.refused, refusal
        assert case.refused in refusal
        assert ask(folder, 1) == "as it was"
        return f"refused: {case.why}"
    assert agent.client.session(name)["pids"] == []
    agent.operate(name, "resume")
    said = ask(folder, 1)
    if case.lost:
        assert case.lost in said
        return f"comes back without its results: {case.why}"
    assert said == "as it was"
    return "works"


def refused(agent: Installation, name: str) -> str:
    """Hibernates a session; the reason when that is refused."""
    try:
        agent.operate(name, "hibernate")
    except PreflightRefused as refusal:
        return refusal.message
    return ""


def test_a_server_is_reached_again_from_outside(shared_agent: Installation, tmp_path: Path) -> None:
    argv = [str(tmp_path) if word == "FOLDER" else word for word in CASES["asyncio"].argv]
    shared_agent.run(*argv, name="server")
    assert ask(tmp_path, 0) == "as it was"
    address = ("127.0.0.1", int((tmp_path / "port").read_text()))
    with socket.create_connection(address) as connection:
        connection.sendall(b"from outside\n")
        assert connection.recv(100) == b"from outside 1\n"
        shared_agent.operate("server", "hibernate")
        assert connection.recv(100) == b""
    shared_agent.operate("server", "resume")
    with socket.create_connection(address) as connection:
        connection.sendall(b"again\n")
        assert connection.recv(100) == b"again 2\n"
    shared_agent.client.remove("server", force=True)


def test_tmux(shared_agent: Installation, tmp_path: Path, table: Table) -> None:
    path = str(shared_agent.home / "tmux")

    def tell(*command: str) -> str:
        done = subprocess.run(["tmux", "-S", path, *command], capture_output=True, text=True, check=False, timeout=60)
        return done.stdout if done.returncode == 0 else ""

    command = ("tmux", "-S", path, "-f", "/dev/null", "-D")
    started = shared_agent.torpor("run", "-d", "--name", "tmux", "--env", "TERM=xterm", "--", *command)
    assert started.returncode == 0, started.stderr
    eventually(lambda: Path(path).exists(), bool)
    tell("new-session", "-d", "bash --norc")
    tell("send-keys", "n=41", "Enter")
    shared_agent.operate("tmux", "hibernate")
    shared_agent.operate("tmux", "resume")
    tell("send-keys", "clear; n=$((n + 1)); echo n is $n", "Enter")
    eventually(lambda: tell("capture-pane", "-p"), lambda text: "n is 42" in text)
    tell("new-window", "bash --norc")
    assert len(tell("list-windows").splitlines()) == 2
    shared_agent.client.remove("tmux", force=True)
    table.add("tmux", "works", "windows, a shell's variables; clients attach again")
