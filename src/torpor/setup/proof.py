"""Proves a CRIU by using it: a small process is dumped, ends, is restored and must answer as before.

The process has what every session has: memory, a TCP listener and a second thread, in its own PID, mount and IPC
namespaces. Everything happens in one child process that adopts whatever its own children leave behind and ends all of
it, within a deadline that holds even when CRIU hangs: nothing stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torpor.engine import procfs
from torpor.engine.criu_binary import Criu
from torpor.errors import SetupError

DEADLINE = 60.0  # seconds for all of it; about one is enough on an idle machine
_STEP_DEADLINE = 20.0  # seconds for one run of CRIU, or for the subject to answer
_PR_SET_CHILD_SUBREAPER = 36
_MEMORY_BYTES = 8 << 20

# The subject opens everything inside its own mount namespace, since CRIU cannot save a file opened outside of it, and
# ends by itself should all of its keepers be gone.
_SUBJECT = """
import hashlib, os, signal, socket, sys, threading
os.setsid()
signal.alarm(int(sys.argv[2]))
null = os.open("/dev/null", os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
os.closerange(3, 256)
memory = os.urandom(int(sys.argv[3]))
listener = socket.create_server(("127.0.0.1", 0))
def serve():
    while True:
        peer, _ = listener.accept()
        peer.sendall(hashlib.sha256(memory).hexdigest().encode())
        peer.close()
threading.Thread(target=serve, daemon=True).start()
with open(sys.argv[1] + ".new", "w") as ready:
    ready.write(str(listener.getsockname()[1]))
os.rename(sys.argv[1] + ".new", sys.argv[1])
threading.Event().wait()
"""


def prove(criu: Criu, deadline: float = DEADLINE) -> float:
    """Dumps and restores the subject with `criu`; the seconds that it took.

    Raises `SetupError` with what CRIU said when the subject cannot be saved, does not come back, comes back changed,
    or when `deadline` seconds are over. Needs root.
    """
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="torpor-proof-"))
    (folder / "root").mkdir()
    try:
        complaint = _run_apart(criu.argv, folder, deadline)
    finally:
        (folder / "root").rmdir()  # no recursive removal: elsewhere the whole file system was bound there
        shutil.rmtree(folder)
    if complaint:
        raise SetupError(
            f"CRIU {criu.version_text} could not save and restore a small process: {complaint}.",
            safe="Nothing was left running, and no session was touched.",
            hint="`torpor doctor` lists what the kernel and the user may be missing.",
        )
    return time.monotonic() - started


def _run_apart(criu: tuple[str, ...], folder: Path, deadline: float) -> str:
    """The proof in a process of its own, whose whole tree can be ended; why it failed, empty when it did not."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "torpor.setup.proof", str(folder), *criu],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
    )
    try:
        output, _ = worker.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        _end_tree(worker.pid)
        worker.communicate()
        return f"it had not finished after {deadline:.0f} s"
    if worker.returncode == 0:
        return ""
    return output.decode(errors="replace").strip().rstrip(".") or f"exit status {worker.returncode}"


class _ProofError(Exception):
    """A step of the proof failed; the text is for the person who asked."""


def _main(folder: Path, criu: tuple[str, ...]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        _dump_and_restore(criu, folder)
    except _ProofError as failure:
        sys.stdout.write(f"{failure}\n")
        return 1
    finally:
        _end_children()
    return 0


def _dump_and_restore(criu: tuple[str, ...], folder: Path) -> None:
    (folder / "images").mkdir()
    ready = folder / "port"
    subject = [sys.executable, "-I", "-S", "-c", _SUBJECT, str(ready), str(int(DEADLINE) * 2), str(_MEMORY_BYTES)]
    namespaces = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "--ipc"]
    with (folder / "start.log").open("wb") as log:
        parent = subprocess.Popen([*namespaces, *subject], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
    _wait_until(lambda: ready.exists() or parent.poll() is not None, "the process to be saved did not start")
    if not ready.exists():
        raise _ProofError(f"the process to be saved did not start: {_last_line(folder / 'start.log')}")
    port = int(ready.read_text())
    before = _ask(port)
    init = procfs.tree(parent.pid)[1]
    common = ["--no-default-config", "--images-dir", str(folder / "images"), "--tcp-close", "-v2"]
    _run(folder / "dump.log", [*criu, "dump", "--tree", str(init), *common, "--external", "mnt[]:m", "--timeout", "15"])
    _wait_until(lambda: parent.poll() is not None, "the saved process did not end")
    restore = [*criu, "restore", *common, "--external", "mnt[]:m", "--root", str(folder / "root")]
    restore += ["--restore-detached", "--restore-sibling", "--pidfile", str(folder / "pid")]
    bind_root = 'mount --rbind / "$0" && exec "$@"'
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", bind_root, str(folder / "root")]
    _run(folder / "restore.log", [*private, *restore])
    if _ask(port) != before:
        raise _ProofError("the restored process answers with other memory than it was saved with")


def _run(log: Path, command: list[str]) -> None:
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/")
    try:
        status = running.wait(_STEP_DEADLINE)
    except subprocess.TimeoutExpired:
        raise _ProofError(f"no end after {_STEP_DEADLINE:.0f} s; CRIU last said: {_last_line(log)}") from None
    if status != 0:
        raise _ProofError(_last_line(log))


def _ask(port: int) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_STEP_DEADLINE) as connection:
            return b"".join(iter(lambda: connection.recv(4096), b""))
    except OSError as error:
        raise _ProofError(f"the process does not answer on its TCP port: {error}") from None


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1 if not errors else 0]


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _STEP_DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise _ProofError(otherwise)
        time.sleep(0.01)


def _end_tree(pid: int) -> None:
    """Kills everything below `pid`, then `pid`: what its children leave behind comes to it until it is gone itself."""
    while below := procfs.tree(pid)[1:]:
        for child in below:
            _kill(child)
        time.sleep(0.01)
    _kill(pid)


def _end_children() -> None:
    """Ends and reaps every child of this process, and what they leave behind."""
    while True:
        for child in procfs.tree(os.getpid())[1:]:
            _kill(child)
        try:
            os.wait()
        except ChildProcessError:
            return


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), tuple(sys.argv[2:])))
