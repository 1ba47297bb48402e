"""Running CRIU: the only module that starts it. Every run has a deadline, after which it is ended.

CRIU asks before its two points of no return (see `hook.py`): with the tree frozen and everything sent
("post-dump"), and with the tree restored but not yet running ("post-restore"). What we answer decides.
"""

from __future__ import annotations

import errno
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torpor.engine import privileges, procfs, trees
from torpor.engine.criu_binary import Criu
from torpor.errors import EngineError
from torpor.model import ProcessId

NOISE = ("RLIMIT_NOFILE for self", "Dumping FAILED", "Restoring FAILED", "Unable to detach")
POINTS = ("post-dump", "post-restore")
LINK_MET = os.strerror(errno.ELOOP)
ERROR_LINES = 4
GRACE = 1.0  # seconds after its deadline until CRIU is killed
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
GATE = 'read -r go && exec "$@" </dev/null'  # the process exists, and is on record, before it does anything
HOOK = """#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in
{points}) exec {python} -IS {program} ;;
esac
"""  # most of CRIU's questions are not ours: a shell says so ten times faster than Python


class CriuRun:
    """One run of CRIU.

    `folder` (private to the worker) holds the images, the log and the hook's socket. `note` is called with the
    process before it may do anything, so that whoever cleans up after a crash can find it.
    """

    def __init__(
        self,
        criu: Criu,
        action: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        deadline: float,
        pass_fds: Sequence[int] = (),
        note: Callable[[ProcessId], None] = lambda _: None,
        place: Callable[[int], None] = lambda _: None,
        user: tuple[int, int] = (0, 0),
        inside: Sequence[str] = (),
        seen_as: Path | None = None,
    ) -> None:
        """`place` is called with CRIU's pid before it does anything: what it restores inherits where it is put.

        `user` owns the tree that is dumped (uid, gid). `inside` is a command prefix that enters other namespaces;
        `seen_as` is then where `folder` is found from there.
        """
        self._folder = folder
        self._action = action
        self._deadline = time.monotonic() + deadline
        self._allowed = deadline
        self._asking: socket.socket | None = None
        self.timed_out = False
        self.at_deadline: Callable[[], None] = lambda: None  # called when it was missed, by another thread
        (folder / "no-plugins").mkdir()
        seen_as = seen_as or folder
        self._install_hook(seen_as)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / "hook.sock"))
        self._listener.listen()
        prefix, further = privileges.dump_as(*user) if action == "dump" else ((), ())
        command = [
            *inside,
            *prefix,
            *criu.argv,
            action,
            "--no-default-config",
            *("--images-dir", str(seen_as), "--log-file", f"{action}.log", "-v2"),
            *("--timeout", str(int(deadline) + 1), "--action-script", str(seen_as / "hook")),
            *arguments,
            *further,
        ]
        if prefix:
            privileges.hand_over(folder, *user)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", GATE, "torpor-criu", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
            env={**ENVIRONMENT, "CRIU_LIBS_DIR": str(seen_as / "no-plugins"), "XDG_RUNTIME_DIR": str(seen_as)},
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        started = procfs.start_time(self._process.pid)
        assert started is not None
        assert self._process.stdin is not None
        note(ProcessId(self._process.pid, started, procfs.boot_id()))
        place(self._process.pid)
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()
        self._watchdog = threading.Timer(deadline, self._time_out)
        self._watchdog.daemon = True
        self._watchdog.start()

    @property
    def pid(self) -> int:
        """CRIU's own pid."""
        return self._process.pid

    def wait_for(self, point: str) -> int:
        """Waits until CRIU asks at `point`; returns the pid (on the node) of the tree's init.

        Questions before that point are answered with "go on". Raises EngineError when CRIU ends instead.
        """
        while True:
            poller = select.poll()
            poller.register(self._listener, select.POLLIN)
            poller.register(self._pidfd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            if self._listener.fileno() not in ready:
                self._process.wait()
                raise self.failure()
            asking, _ = self._listener.accept()
            asked, _, pid = asking.recv(128).decode().partition(" ")
            if asked == point:
                self._asking = asking
                return int(pid)
            asking.send(b"0")
            asking.close()

    def answer(self, *, go_on: bool) -> None:
        """Answers the question that `wait_for` returned with. Without an open question nothing happens."""
        if self._asking is not None:
            with self._asking as asking:
                self._asking = None
                try:
                    asking.send(b"0" if go_on else b"1")
                except OSError:
                    return  # CRIU is gone; `wait` tells how

    def still_asks(self) -> bool:
        """Whether CRIU lives and waits for our answer; if not, what it held is as if it had never asked."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return self._asking is not None and not poller.poll(0)

    def wait(self) -> int:
        """CRIU's exit status, once it has ended by itself or at its deadline."""
        status = self._process.wait()
        self._watchdog.cancel()
        self._listener.close()
        os.close(self._pidfd) if self._pidfd >= 0 else None
        self._pidfd = -1
        return status

    def end(self) -> None:
        """Ends CRIU, its hook, and whatever it was restoring, at once. A tree that it had frozen goes on."""
        trees.end(self._process.pid)
        self._process.wait()

    def failure(self) -> EngineError:
        """What went wrong, in CRIU's own last words."""
        verb = "save" if self._action == "dump" else "restore"
        if self.timed_out:
            return EngineError(f"CRIU did not {verb} the session within {self._allowed:.0f} seconds and was ended.")
        if self._action == "restore" and any(LINK_MET in line for line in self.errors()):
            return EngineError(
                f"A path of the session was exchanged for a symbolic link, which is not followed: {self.errors()[0]}.",
                safe="The session is as it was before.",
                hint="Put back what was there, and resume it again.",
            )
        said = "; ".join(self.errors()) or f"it ended with status {self._process.returncode} and no message"
        return EngineError(f"CRIU could not {verb} the session: {said}.")

    def errors(self) -> list[str]:
        """The last error lines of CRIU's log, without times and source positions."""
        try:
            lines = (self._folder / f"{self._action}.log").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        said = [line.split("): ", 1)[-1].strip().rstrip(".") for line in lines if "Error (" in line]
        return [line for line in said if not any(part in line for part in NOISE)][-ERROR_LINES:]

    def keep_log(self, target: Path) -> None:
        """Copies CRIU's log (root only) to where it outlives this run."""
        source = self._folder / f"{self._action}.log"
        if source.exists():
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as copy:
                copy.write(source.read_bytes())

    def _install_hook(self, seen_as: Path) -> None:
        shutil.copyfile(Path(__file__).with_name("hook.py"), self._folder / "hook.py")
        hook = self._folder / "hook"
        python, asking = shlex.quote(_plain_python()), shlex.quote(str(seen_as / "hook.py"))
        hook.write_text(HOOK.format(points="|".join(POINTS), python=python, program=asking))
        hook.chmod(0o700)

    def _time_out(self) -> None:
        """A CRIU that waits for us is let go first: what it undoes by itself is undone better than by its death."""
        self.timed_out = True
        self.at_deadline()
        try:
            pidfd = os.pidfd_open(self._process.pid)
        except ProcessLookupError:
            return
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(GRACE * 1000):
            trees.end(self._process.pid)
        os.close(pidfd)


def _plain_python() -> str:
    system = Path("/usr/bin/python3")
    return str(system) if system.exists() else sys.executable
