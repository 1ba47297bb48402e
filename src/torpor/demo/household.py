"""Everything that the demonstration starts lives in one folder and below one process, and ends with it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from torpor.demo import machine
from torpor.errors import SetupError, TorporError

PR_SET_CHILD_SUBREAPER = 36
GRACE = 10.0  # seconds between asking a process to end and ending it
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Household:
    """A temporary folder and the processes of the demonstration. As a context manager it leaves neither behind.

    While it is open this process adopts what its children leave behind, so that daemons can be found again; SIGTERM
    and SIGHUP end the block like Ctrl-C does.
    """

    def __init__(self) -> None:
        self.leftovers: list[str] = []

    def __enter__(self) -> Household:
        _adopt_orphans(True)
        # Not in /tmp, which may be memory: what is asleep would occupy what it has given back.
        parent = os.environ.get("TMPDIR") or "/var/tmp"
        self.home = Path(tempfile.mkdtemp(prefix="torpor-demo-", dir=parent))
        self.home.chmod(0o755)
        (self.home / "tmp").mkdir(mode=0o1777)
        self._before = machine.identify(machine.descendants(os.getpid()))
        self._children: list[subprocess.Popen[bytes]] = []
        self._handlers = {number: signal.signal(number, _leave) for number in ENDING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        try:
            self.clear()
        finally:
            _adopt_orphans(False)
            for number, handler in (*self._handlers.items(), (signal.SIGINT, interrupt)):
                signal.signal(number, handler)

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process, in a session of its own since Ctrl-C is for this one alone; it prints to `log(name)`."""
        with open(self.log(name), "ab") as log:
            child = subprocess.Popen(
                argv,
                env=env,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def log(self, name: str) -> Path:
        """Where the process of this name prints to."""
        return self.home / f"{name}.log"

    def wait_until(self, what: str, ready: Callable[[], bool], child: subprocess.Popen[bytes], name: str) -> None:
        """Waits at most a minute until `ready`. Raises SetupError with the end of the log when `child` ends before."""
        deadline = time.monotonic() + 60
        while not ready():
            if child.poll() is not None:
                raise SetupError(f"{what} ended with status {child.returncode}.", hint=self._last_words(name))
            if time.monotonic() > deadline:
                raise SetupError(f"{what} did not answer within a minute.", hint=self._last_words(name))
            time.sleep(0.05)

    def clear(self) -> None:
        """Ends every process and removes the folder; what could not be removed is named in `leftovers`."""
        for child in reversed(self._children):
            _end(child)
        ours = [process for process in self._descendants() if process not in self._before]
        for number in (signal.SIGTERM, signal.SIGKILL):
            _send(ours, number)
            ours = self._outlasting(ours)
        self.leftovers = [f"process {pid}" for pid, _ in ours]
        self.leftovers += [f"mount {point}" for point in _mounts_below(self.home)]
        if not self.leftovers:
            shutil.rmtree(self.home, ignore_errors=True)
        if self.home.exists():
            self.leftovers.append(f"folder {self.home}")

    def _descendants(self) -> list[machine.Process]:
        return machine.identify(machine.descendants(os.getpid()))

    def _outlasting(self, processes: list[machine.Process]) -> list[machine.Process]:
        """Those that are still there after a grace, daemons' own late children included."""
        deadline = time.monotonic() + GRACE
        while True:
            _reap(processes)
            new = [process for process in self._descendants() if process not in self._before]
            processes = list(dict.fromkeys([*machine.still_there(processes), *new]))
            if not processes or time.monotonic() > deadline:
                return processes
            time.sleep(0.05)

    def _last_words(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").strip().splitlines()[-5:]
        return "It said last: " + " / ".join(lines) if lines else "It said nothing."


def raise_leftovers(household: Household) -> None:
    """Raises TorporError when something of the demonstration could not be removed."""
    if household.leftovers:
        raise TorporError(f"The demonstration left behind: {', '.join(household.leftovers)}.")


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _adopt_orphans(on: bool) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise SetupError(f"The kernel does not let a process adopt orphans: {os.strerror(ctypes.get_errno())}.")


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _send(processes: list[machine.Process], number: signal.Signals) -> None:
    for pid, _ in machine.still_there(processes):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # ended meanwhile


def _reap(processes: list[machine.Process]) -> None:
    for pid, _ in processes:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # another's child, or reaped already


def _mounts_below(folder: Path) -> list[str]:
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if Path(point).is_relative_to(folder)]
