"""Becomes a session: new mount, pid and ipc namespaces, the caller's identity and bounds, then `init.py`.

A script of its own (`python3 -I -S launcher.py SPEC_FD PID_FD REPORT_FD STDIN_FD`), executed by the keeper as root. The
spec is the keeper's JSON: `launch`, `caller`, `folder`, `terminal`; where a tree will be restored that was not started
here, also `adopt`, `last_pid` (the process number after which the first ones are given out), and `clocks` (what they
showed). On PID_FD goes one line of JSON, written by the trusted part alone: pid and start time of the session's first
process. On REPORT_FD follow notes and either an error or, from `init.py`, that it is ready.

Every file that the session will hold open is opened here, inside its own mount namespace: CRIU can save no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWTIME = 0x00020000, 0x08000000, 0x20000000, 0x80
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 23, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION_3 = 0x20080522
SYS_KEYCTL = {"x86_64": 250, "ppc64le": 271, "s390x": 280}.get(os.uname().machine, 219)
KEYCTL_JOIN_SESSION_KEYRING = 1
STRIPPED_FROM_ENVIRONMENT = ("JPY_PARENT_PID",)  # names a process outside: ipykernel would end at once
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """The session cannot be started; the text says why."""


def main() -> None:
    """Start the session's first process and leave it to the keeper, which adopts it as subreaper."""
    spec_fd, pid_fd, report_fd, stdin_fd = (int(argument) for argument in sys.argv[1:5])
    spec = _read_json(spec_fd)
    source = _read_init_source()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # the node's: the session soon mounts its own over it
    try:
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC), "new namespaces cannot be made")
        if spec.get("clocks"):
            _continue_clocks(spec["clocks"])
        pid = os.fork()
    except (RefusedError, OSError) as error:
        _report(report_fd, {"error": f"The session's namespaces cannot be made: {error}."})
        sys.exit(1)
    if pid == 0:
        os.close(pid_fd)
        _become_session(spec, source, report_fd, stdin_fd)
    _report(pid_fd, {"pid": pid, "start_time": _start_time(proc, pid)})


def _continue_clocks(clocks: list[tuple[int, int, int]]) -> None:
    """A time namespace for the children, in which these clocks go on from what they showed."""
    _check(libc.unshare(CLONE_NEWTIME), "a time namespace cannot be made")
    offsets = []
    for clock, seconds, nanoseconds in clocks:
        offset = seconds * 10**9 + nanoseconds - time.clock_gettime_ns(clock)
        offsets.append(f"{clock} {offset // 10**9} {offset % 10**9}\n")
    _write_text("/proc/self/timens_offsets", "".join(offsets))


def _become_session(spec: dict[str, Any], source: bytes, report_fd: int, stdin_fd: int) -> NoReturn:
    caller, launch = spec["caller"], spec["launch"]
    try:
        os.setsid()
        _make_mounts(own_terminals=launch["io"] != "terminal")
        if "last_pid" in spec:
            _write_text("/proc/sys/kernel/ns_last_pid", str(spec["last_pid"]))
        folder = os.open(spec["folder"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        exit_fd = _open_owned(folder, "exit", APPEND | os.O_TRUNC, caller["uid"])
        _connect_streams(spec, folder, stdin_fd)
        for note in _join_cgroups(caller["cgroups"]):
            _report(report_fd, {"note": note})
        _take_scheduling(caller)
        join_fresh_keyring()
        _restrict(caller)
        _become_user(caller)
        _enter(launch["cwd"])
        arguments = [
            "-I",
            "-S",
            _memory_file(source),
            _memory_file(_command_line(launch, adopt=bool(spec.get("adopt")))),
            str(exit_fd),
            str(report_fd),
        ]
        _keep_only({0, 1, 2, exit_fd, report_fd, *map(int, arguments[2:4])})
        arguments[2] = f"/proc/self/fd/{arguments[2]}"
        os.execve(sys.executable, [sys.executable, *arguments], {"LC_ALL": "C.UTF-8"})
    except (RefusedError, OSError) as error:
        _report(
            report_fd,
            {"error": f"{error}" if isinstance(error, RefusedError) else f"The session cannot start: {error}."},
        )
    os._exit(1)


def _make_mounts(*, own_terminals: bool) -> None:
    """`own_terminals`: pseudo-terminals are numbered by themselves, so that a number is free when they come back."""
    size = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if size is not None:
        total = f"mode=1777,size={size.f_frsize * size.f_blocks or 0}"
        _mount("torpor-shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, total)
    if own_terminals and os.path.isdir("/dev/pts"):
        _mount("torpor-pts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = kind.encode() if kind else None
    done = libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode())
    _check(done, f"mounting {target}")


def _connect_streams(spec: dict[str, Any], folder: int, stdin_fd: int) -> None:
    uid, io = spec["caller"]["uid"], spec["launch"]["io"]
    if io == "terminal":
        _place(os.open(spec["terminal"], os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC), 0, 1, 2)
        return
    _place(stdin_fd if io == "streams" else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
    output = _open_owned(folder, "out.log", APPEND, uid)
    if io == "streams":
        _place(output, 1)
        _place(_open_owned(folder, "err.log", APPEND, uid), 2)
    else:
        _place(output, 1, 2)


def _place(fd: int, *targets: int) -> None:
    for target in targets:
        os.dup2(fd, target)
    os.close(fd)


def _open_owned(folder: int, name: str, flags: int, uid: int) -> int:
    """A regular file in the session's folder, which only root can put things into, given to the session's user."""
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise RefusedError(f"{name} in the session's folder is not a regular file.")
    os.fchown(fd, uid, -1)
    os.fchmod(fd, 0o600)
    return fd


def _join_cgroups(lines: list[str]) -> list[str]:
    """Put this process into the caller's cgroups; returns a sentence for each that is gone."""
    gone, refused = join_cgroups("self", lines)
    if refused:
        raise RefusedError(f"The caller's cgroup {refused[0]} cannot be joined.")
    return [f"The caller's cgroup {path} is gone; the session stays outside it." for path in gone]


def join_cgroups(pid: int | str, lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Move a process into cgroups, version 1 and 2, given as lines of /proc/PID/cgroup.

    Returns the paths that are gone, and those that cannot be joined.
    """
    gone, refused = [], []
    own = set(_read_text(f"/proc/{pid}/cgroup").splitlines())
    mounted = _cgroup_mounts()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if line in own or controllers not in mounted:
            continue
        root, point = mounted[controllers]
        relative = path if root == "/" else path.removeprefix(root)
        try:
            if ".." in relative.split("/"):  # above what this cgroup namespace shows
                raise FileNotFoundError(relative)
            with open(f"{point}/{relative.strip('/')}/cgroup.procs", "w") as members:
                members.write("0" if pid == "self" else str(pid))
        except FileNotFoundError:
            gone.append(path)
        except OSError:
            refused.append(path)
    return gone, refused


def _cgroup_mounts() -> dict[str, tuple[str, str]]:
    """Controllers, as /proc/PID/cgroup writes them, to root and mount point of their hierarchy."""
    mounted: dict[str, tuple[str, str]] = {}
    wanted = [line.split(":", 2)[1] for line in _read_text("/proc/self/cgroup").splitlines()]
    for line in _read_text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split(" ")[3:5]
        if kind == "cgroup2":
            mounted[""] = (root, point)
        elif kind == "cgroup":
            present = set(options.split(","))
            mounted.update({name: (root, point) for name in wanted if name and set(name.split(",")) <= present})
    return mounted


def _take_scheduling(caller: dict[str, Any]) -> None:
    if caller["affinity"]:
        try:
            os.sched_setaffinity(0, caller["affinity"])
        except OSError as error:
            raise RefusedError(f"The caller's processors {caller['affinity']} cannot be used: {error}.") from error
    os.setpriority(os.PRIO_PROCESS, 0, caller["nice"])
    # A service manager may have shielded the keeper, or the caller: that is not for sessions.
    _write_text("/proc/self/oom_score_adj", str(max(caller["oom_score_adj"], 0)))


def join_fresh_keyring() -> None:
    """Gives this process, and what it starts, an empty keyring in place of the one of whoever started the keeper.

    Raises RefusedError. A kernel or a container without keyrings has none to inherit.
    """
    if libc.syscall(SYS_KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None) < 0:
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EPERM):
            raise RefusedError(f"A new session keyring cannot be made: {os.strerror(code)}.")


def _restrict(caller: dict[str, Any]) -> None:
    """The caller's limits and capability bounds; no new privileges for anything the session ever executes."""
    for name, (soft, hard) in caller["limits"].items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))
        except (ValueError, OSError) as error:
            raise RefusedError(f"The caller's limit {name} ({soft}, {hard}) cannot be set: {error}.") from error
    capability = 0
    while (present := libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0)) >= 0:
        if present and not caller["capabilities_bounding"] >> capability & 1:
            _check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "the capability bounds cannot be set")
        capability += 1
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "new privileges cannot be forbidden")
    _check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities cannot be cleared")
    _drop_inheritable_capabilities()


def _drop_inheritable_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits of each
    _check(libc.capget(header, data), "capabilities cannot be read")
    data[2] = data[5] = 0
    _check(libc.capset(header, data), "inheritable capabilities cannot be dropped")


def _become_user(caller: dict[str, Any]) -> None:
    os.umask(caller["umask"])
    os.setgroups(caller["groups"])
    os.setresgid(caller["gid"], caller["gid"], caller["gid"])
    os.setresuid(caller["uid"], caller["uid"], caller["uid"])


def _enter(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        raise RefusedError(f"The working directory {cwd} cannot be entered: {error.strerror}.") from error


def _command_line(launch: dict[str, Any], *, adopt: bool) -> bytes:
    environment = {name: value for name, value in launch["env"].items() if name not in STRIPPED_FROM_ENVIRONMENT}
    arguments = launch["argv"]
    mode = "adopt" if adopt else "terminal" if launch["io"] == "terminal" else ""
    fields = [mode, str(len(arguments)), *arguments]
    fields += [f"{name}={value}" for name, value in environment.items()]
    if any("\0" in field for field in fields):
        raise RefusedError("A NUL byte in the command or in its environment.")
    return b"\0".join(os.fsencode(field) for field in fields)


def _memory_file(content: bytes) -> str:
    fd = os.memfd_create("torpor-init", os.MFD_CLOEXEC)
    os.set_inheritable(fd, True)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return str(fd)


def _keep_only(fds: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd in fds:
            os.set_inheritable(fd, True)
        else:
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
                os.close(fd)


def _report(fd: int, message: dict[str, Any]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def _check(result: int, what: str) -> None:
    if result < 0:
        raise RefusedError(f"The session cannot start ({what}): {os.strerror(ctypes.get_errno())}.")


def _start_time(proc: int, pid: int) -> int:
    with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc)) as file:
        return int(file.read().rpartition(")")[2].split()[19])


def _read_init_source() -> bytes:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "init.py"), "rb") as file:
        return file.read()


def _read_json(fd: int) -> dict[str, Any]:
    with os.fdopen(fd, "rb") as file:
        content: dict[str, Any] = json.loads(file.read())
    return content


def _write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _read_text(path: str) -> str:
    with open(path) as file:
        return file.read()


if __name__ == "__main__":
    main()
