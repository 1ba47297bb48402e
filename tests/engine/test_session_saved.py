"""What the launcher starts can be saved and brought back by CRIU, again and again: terminal, pipe, shared memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.engine.stage import Stage, eventually, in_foreground

from torpor.engine import procfs
from torpor.engine.criu_binary import require_criu
from torpor.engine.keeper_client import open_stdin
from torpor.model import InputOutput

DEADLINE = 60
COMMON = ("--tcp-close", "--ext-unix-sk", "--file-locks", "--external", "mnt[]:m")
IN_PRIVATE_MOUNTS = """
set -e
mount --make-rprivate /
mkdir -p "$1/root" "$1/shm"
mount -t tmpfs -o mode=1777 torpor-shm "$1/shm"
cp -a "$1/saved/." "$1/shm/"
mount --rbind / "$1/root"
shift
exec "$@"
"""
KEEPS_SHARED_MEMORY = """
import os, time
kept = open("/dev/shm/kept", "w+"); kept.write("kept"); kept.flush()
gone = open("/dev/shm/gone", "w+"); gone.write("gone"); gone.flush(); os.unlink("/dev/shm/gone")
while True:
    for file in (kept, gone): file.seek(0)
    print(kept.read(), gone.read(), os.listdir("/dev/shm"), flush=True)
    time.sleep(0.05)
"""


class Saved:
    """A session that was saved and ended, in a folder of its own."""

    def __init__(self, stage: Stage, pid: int, *arguments: str) -> None:
        self.stage = stage
        self.folder = stage.home / "saved-by-criu"
        self.images = self.folder / "images"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.images.mkdir(parents=True)
        hook = self.folder / "hook"
        copy = f"cp -a /proc/{pid}/root/dev/shm {self.folder}/saved"
        hook.write_text(f"#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION != post-dump ] || {copy}\n")
        hook.chmod(0o700)
        stage.keeper.away("a", True)
        self._criu("dump", "-t", str(pid), "--external", "mnt[/dev/shm]:shm", "--action-script", str(hook), *arguments)
        eventually(lambda: procfs.tree(pid) == [])

    def restore(self, *arguments: str, pass_fds: Sequence[int] = ()) -> int:
        """Back as the keeper's session; its first process's new pid."""
        pidfile = self.folder / "pid"
        before = ["unshare", "-m", "sh", "-c", IN_PRIVATE_MOUNTS, "sh", str(self.folder)]
        places = ["--root", str(self.folder / "root"), "--external", f"mnt[shm]:{self.folder}/shm"]
        self._criu("restore", "-d", *places, "--pidfile", str(pidfile), *arguments, before=before, pass_fds=pass_fds)
        pid, start_time = procfs.identify(int(pidfile.read_text()))
        self.stage.keeper.adopt("a", pid, start_time)
        return pid

    def _criu(self, *command: str, before: Sequence[str] = (), pass_fds: Sequence[int] = ()) -> None:
        criu = require_criu(self.stage.paths).argv
        log = self.images / f"{command[0]}.log"
        options = [*COMMON, "--timeout", str(DEADLINE), "-D", str(self.images), "-o", log.name, "--no-default-config"]
        argv = [*before, *criu, *command, *options]
        with subprocess.Popen(argv, pass_fds=pass_fds, start_new_session=True, stderr=subprocess.DEVNULL) as running:
            try:
                status = running.wait(DEADLINE + 5)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                raise
        assert status == 0, log.read_text()[-3000:]


def test_a_shell_comes_back_with_its_terminal_and_its_jobs(stage: Stage) -> None:
    env = {"PATH": os.environ["PATH"], "PS1": "$ ", "TERM": "dumb"}
    made = stage.launch("bash", "--norc", "--noediting", "-i", io=InputOutput.TERMINAL, env=env, rows=31, columns=90)
    assert made.terminal
    device = os.stat(made.terminal)
    key = f"tty[{device.st_rdev:x}:{device.st_dev:x}]"
    pid = made.pid
    with stage.attach() as client:
        client.type(b"X=41; sleep 1000 &\n")
        client.read_until(b"[1] ")
        for cycle in range(3):
            client.type(b"cat\n")
            eventually(partial(in_foreground, pid, "cat"))
            saved = Saved(stage, pid, "--external", key)
            client.type(b"typed while away %d\n" % cycle)
            path = stage.keeper.hold_terminal("a", 24, 80)
            slave = os.open(path, os.O_RDWR | os.O_NOCTTY)
            pid = saved.restore("--inherit-fd", f"fd[{slave}]:{key}", pass_fds=[slave])
            os.close(slave)
            client.read_until(b"typed while away %d\r\ntyped while away %d\r\n" % (cycle, cycle))
            client.type(b"\x03")
            client.read_until(b"$ ")
            eventually(partial(in_foreground, pid, "bash"))
            client.type(b"echo $((X+1)) $(tty) $(stty size) $(jobs)\n")
            client.read_until(f"42 {path} 31 90 [1]+ Running sleep 1000 &\r\n".encode())
            client.type(b"cat\n")
            eventually(partial(in_foreground, pid, "cat"))
            client.type(b"\x1a")
            client.read_until(b"Stopped")
            eventually(partial(in_foreground, pid, "bash"))
            client.type(b"kill %2; wait %2; echo job''gone\n")
            client.read_until(b"jobgone")
        client.type(b"exit 5\n")
        client.read_to_end()
        assert client.status == "5"


def test_what_lies_in_the_pipe_is_read_once_and_its_end_is_exact(stage: Stage) -> None:
    made = stage.launch("sh", "-c", "while read -r line; do echo got $line; done; exit 7", io=InputOutput.STREAMS)
    stdin = open_stdin(stage.paths.attach_socket, "a")
    pid = made.pid
    for cycle in range(2):
        main = procfs.tree(pid)[1]
        os.kill(main, signal.SIGSTOP)
        os.write(stdin, b"held %d\n" % cycle)
        pipe = stage.keeper.take_fds("a")["stdin"]
        key = f"pipe:[{os.fstat(pipe).st_ino}]"
        saved = Saved(stage, pid)
        os.write(stdin, b"away %d\n" % cycle)
        pid = saved.restore("--inherit-fd", f"fd[{pipe}]:{key}", pass_fds=[pipe])
        os.close(pipe)
        os.kill(procfs.tree(pid)[1], signal.SIGCONT)
        stage.wait_for_output(f"got away {cycle}")
    os.close(stdin)
    assert stage.wait_for_exit() == 7
    assert stage.output() == "got held 0\ngot away 0\ngot held 1\ngot away 1\n"


def test_shared_memory_and_a_growing_log_come_back(stage: Stage) -> None:
    pid = stage.python(KEEPS_SHARED_MEMORY).pid
    stage.wait_for_output("kept gone ['kept']")
    for _ in range(2):
        saved = Saved(stage, pid, "--ghost-limit", "1G")
        with open(stage.folder("a") / "out.log", "a") as log:
            log.write("grown while away\n")
        pid = saved.restore()
        count = len(stage.output().splitlines())
        eventually(lambda: len(stage.output().splitlines()), (count + 3).__lt__)
    assert set(stage.output().splitlines()) == {"kept gone ['kept']", "grown while away"}
    assert not Path("/dev/shm/kept").exists()
