"""What the kernel tells about processes, read from `/proc`. Standard library only: the keeper imports this.

A process is named by its pid and its start time (clock ticks after boot), never by the pid alone.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torpor.errors import NotFound, NotPermitted

if TYPE_CHECKING:
    from torpor.model import Caller, ProcessId

NAMESPACES = ("mnt", "user", "pid", "net", "ipc", "uts", "cgroup", "time")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
_DEAD_STATES = "ZXx"
_STABLE_WALKS = 8

# Titles in /proc/PID/limits, whose columns start at fixed places, and the names that setrlimit knows them by.
_LIMIT_NAMES = {
    "Max cpu time": "CPU",
    "Max file size": "FSIZE",
    "Max data size": "DATA",
    "Max stack size": "STACK",
    "Max core file size": "CORE",
    "Max resident set": "RSS",
    "Max processes": "NPROC",
    "Max open files": "NOFILE",
    "Max locked memory": "MEMLOCK",
    "Max address space": "AS",
    "Max pending signals": "SIGPENDING",
    "Max msgqueue size": "MSGQUEUE",
    "Max nice priority": "NICE",
    "Max realtime priority": "RTPRIO",
    "Max realtime timeout": "RTTIME",
}


class Ids(NamedTuple):
    """What a process belongs to: its parent, its process group (job) and its session, and its terminal's device."""

    parent: int
    group: int
    session: int
    terminal: int


def boot_id() -> str:
    """The random id that this boot of the machine got from the kernel."""
    return _current_boot()


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks after boot; None when there is no such process. Zombies have one too."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def identify(pid: int) -> tuple[int, int]:
    """`(pid, start_time)` of a process that exists. Raises NotFound when it does not."""
    started = start_time(pid)
    if started is None:
        raise NotFound(f"Process {pid} does not exist.")
    return pid, started


def alive(pid: int, start_time: int, boot_id: str) -> bool:
    """Whether exactly this process still runs: same boot, same start time, and not a zombie."""
    if boot_id != _current_boot():
        return False
    fields = _stat(pid)
    return fields is not None and int(fields[19]) == start_time and not _is_dead(pid, fields)


def tree(init_pid: int) -> list[int]:
    """All live processes below and including `init_pid`, which comes first; empty when it is gone.

    A process that forks or is reparented during the walk could be missed, so the walk is repeated until two
    in a row agree. Only a frozen tree gives an exact answer.
    """
    previous = _walk(init_pid)
    for _ in range(_STABLE_WALKS):
        current = _walk(init_pid)
        if current == previous:
            break
        previous = current
    return previous


def cpu_seconds(pids: Iterable[int]) -> float:
    """User plus system CPU time of these processes and of the children they waited for, in seconds."""
    ticks = 0
    for pid in pids:
        fields = _stat(pid)
        if fields:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICKS_PER_SECOND


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident bytes of these processes; a page that two of them share counts twice."""
    pages = 0
    for pid in pids:
        statm = _read_of(pid, "statm")
        if statm:
            pages += int(statm.split()[1])
    return pages * _PAGE_SIZE


def namespaces(pid: int) -> dict[str, str]:
    """Link targets of the namespaces of `pid`, such as `{"mnt": "mnt:[4026531841]"}`. Raises NotFound."""
    try:
        present = set(os.listdir(f"/proc/{pid}/ns"))
        return {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in NAMESPACES if name in present}
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(f"Process {pid} does not exist.") from error


def nspid(pid: int) -> int:
    """The pid that the process has inside its own pid namespace. Raises NotFound."""
    return int(_status(pid)["NSpid"].split()[-1])


def traced(pids: Iterable[int]) -> bool:
    """Whether a debugger, or CRIU, still holds one of these processes."""
    return any(int(_status(pid).get("TracerPid", "0")) for pid in pids if _stat(pid) is not None)


def uid(pid: int) -> int:
    """The effective user id of the process. Raises NotFound."""
    return int(_status(pid)["Uid"].split()[1])


def gid(pid: int) -> int:
    """The effective group id of the process. Raises NotFound."""
    return int(_status(pid)["Gid"].split()[1])


def ids(pid: int) -> Ids:
    """What the process belongs to. Raises ProcessLookupError."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"Process {pid} does not exist.")
    return Ids(*(int(field) for field in fields[1:5]))


def name(pid: int) -> str:
    """What the process calls itself; a question mark when it is gone."""
    return (_read_of(pid, "comm") or "?").strip()


def arguments(pid: int) -> list[str]:
    """The command line of the process; empty when it is gone."""
    line = (_read_of(pid, "cmdline") or "").rstrip("\0")
    return line.split("\0") if line else []


def program(pid: int) -> str | None:
    """Path of the program that the process executes; None when it is gone or a thread of the kernel."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except (FileNotFoundError, ProcessLookupError):
        return None


def environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with; empty when it is gone."""
    pairs = (entry.partition("=") for entry in (_read_of(pid, "environ") or "").split("\0"))
    return {name: value for name, equals, value in pairs if equals and name}


def kill(process: ProcessId) -> bool:
    """SIGKILL to exactly this process; False when it is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if alive(process.pid, process.start_time, process.boot_id):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return True
    except ProcessLookupError:
        pass  # it has just ended by itself
    finally:
        os.close(pidfd)
    return False


def all_pids() -> list[int]:
    """Every process that can be seen from here."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def confinement(pid: int) -> list[str]:
    """What holds the process back, beyond what holds this one: `a seccomp filter`, `the AppArmor profile X`.

    Raises NotFound. A Landlock domain cannot be seen from outside.
    """
    held = ["a seccomp filter"] if _filters(pid) > _filters("self") else []
    profile = _apparmor_profile(pid)
    if profile is not None and profile != _apparmor_profile("self"):
        held.append(f"the AppArmor profile {profile}")
    return held


def uids(pid: int) -> tuple[int, ...]:
    """Real, effective, saved and file system user id of the process. Raises NotFound."""
    return tuple(int(number) for number in _status(pid)["Uid"].split())


def caller_facts(pid: int, uid: int, gid: int, groups: tuple[int, ...] | None = None) -> Caller:
    """What a session started for the peer `pid` takes over from it; `uid`, `gid` and `groups` are its peer credentials
    (`groups` None: as they are now).

    Raises NotFound when the peer is gone (or in a pid namespace that cannot be seen from here), NotPermitted
    when the process of that pid is no longer the one that connected.
    """
    from torpor.model import Caller  # here, so that the keeper stays small

    if pid <= 0:
        raise NotFound("The caller is in a pid namespace that cannot be seen from here.")
    status = _status(pid)
    if int(status["Uid"].split()[1]) != uid:
        raise NotPermitted(f"Process {pid} is not the one that connected.", hint="Run the command again.")
    fields = _stat(pid)
    limits = _read_of(pid, "limits")
    cgroups = _read_of(pid, "cgroup")
    oom_score_adj = _read_of(pid, "oom_score_adj")
    if fields is None or limits is None or cgroups is None or oom_score_adj is None:
        raise NotFound(f"Process {pid} does not exist.")
    try:
        affinity = tuple(sorted(os.sched_getaffinity(pid)))
    except ProcessLookupError as error:
        raise NotFound(f"Process {pid} does not exist.") from error
    return Caller(
        uid=uid,
        gid=gid,
        groups=tuple(int(group) for group in status["Groups"].split()) if groups is None else groups,
        umask=int(status["Umask"], 8),
        affinity=affinity,
        limits=_parse_limits(limits),
        cgroups=tuple(cgroups.splitlines()),
        namespaces=namespaces(pid),
        capabilities_bounding=_capabilities(status, uid),
        nice=int(fields[16]),
        oom_score_adj=int(oom_score_adj),
    )


def _capabilities(status: dict[str, str], uid: int) -> int:
    """What a session may ever have: root gets what this root has itself, others have none to begin with."""
    bounding = int(status["CapBnd"], 16)
    return bounding & int(status["CapPrm"], 16) if uid == 0 else bounding


def _filters(pid: int | str) -> int:
    """How many seccomp filters; a kernel that does not count them tells whether there are any."""
    status = _status(pid)
    return int(status.get("Seccomp_filters") or status.get("Seccomp", "0"))


def _apparmor_profile(pid: int | str) -> str | None:
    try:
        return _read(f"/proc/{pid}/attr/apparmor/current").strip("\0\n") or None
    except (FileNotFoundError, ProcessLookupError):
        return None  # no such module in this kernel
    except OSError as error:
        if error.errno == errno.EINVAL:  # the module is there, and not in use
            return None
        raise


def _current_boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id").strip()


def _walk(init_pid: int) -> list[int]:
    found: list[int] = []
    waiting = [init_pid]
    while waiting:
        pid = waiting.pop(0)
        fields = _stat(pid)
        if fields is None or _is_dead(pid, fields):
            continue
        found.append(pid)
        waiting.extend(_children(pid))
    return found


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    children: list[int] = []
    for thread in threads:
        listed = _read_of(pid, f"task/{thread}/children")
        children.extend(int(child) for child in (listed or "").split())
    return sorted(children)


def _is_dead(pid: int, fields: list[str]) -> bool:
    """A process whose first thread has ended looks like a zombie while its other threads still run."""
    if fields[0] not in _DEAD_STATES:
        return False
    return int(fields[17]) <= 1 or not any(_thread_lives(pid, thread) for thread in _threads(pid) if thread != str(pid))


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _thread_lives(pid: int, thread: str) -> bool:
    text = _read_of(pid, f"task/{thread}/stat")
    return text is not None and text.rpartition(")")[2].split()[0] not in _DEAD_STATES


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on: the second may itself hold blanks and brackets."""
    text = _read_of(pid, "stat")
    return text.rpartition(")")[2].split() if text else None


def _status(pid: int | str) -> dict[str, str]:
    text = _read_of(pid, "status")
    if not text:
        raise NotFound(f"Process {pid} does not exist.")
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}


def _parse_limits(text: str) -> dict[str, tuple[int, int]]:
    limits: dict[str, tuple[int, int]] = {}
    for line in text.splitlines()[1:]:
        name = _LIMIT_NAMES.get(line[:26].strip())
        if name:
            soft, hard = line[26:].split()[:2]
            limits[name] = (_limit_value(soft), _limit_value(hard))
    return limits


def _limit_value(text: str) -> int:
    return -1 if text == "unlimited" else int(text)


def _read_of(pid: int | str, name: str) -> str | None:
    try:
        return _read(f"/proc/{pid}/{name}")
    except (FileNotFoundError, ProcessLookupError):
        return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
