"""Ended processes: the keeper's own children and those that it inherits, and what a pidfd tells of others."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable

from torpor.engine import procfs

REMEMBERED = 256
# struct pidfd_info: mask, cgroup id, pid, tgid, ppid, eight ids, exit code. The exit code came with Linux 6.15.
_INFO = struct.Struct("QQIII8Ii")
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3


class Children:
    """Reaps every child and inherited orphan. Those that nobody claimed are remembered for a while, since a
    session's process may end between its restore and the moment when the keeper is told of it."""

    def __init__(self, ended: Callable[[int, int, int], bool]) -> None:
        """`ended(pid, start_time, status)` says whether it knew the process; `status` is 128 + signal when killed."""
        self._ended = ended
        self._unclaimed: dict[tuple[int, int], int] = {}

    def reap(self) -> None:
        """Reap all that have ended. Looks before it reaps: until then the pid cannot be another process's."""
        while True:
            try:
                waiting = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if waiting is None:
                return
            pid = waiting.si_pid
            start_time = procfs.start_time(pid) or 0
            os.waitid(os.P_PID, pid, os.WEXITED)
            killed = waiting.si_code != os.CLD_EXITED
            status = waiting.si_status + 128 if killed else waiting.si_status
            if not self._ended(pid, start_time, status):
                self._remember((pid, start_time), status)

    def claim(self, pid: int, start_time: int) -> int | None:
        """The exit status of a process that was reaped before anybody asked for it, once."""
        return self._unclaimed.pop((pid, start_time), None)

    def _remember(self, process: tuple[int, int], status: int) -> None:
        self._unclaimed[process] = status
        while len(self._unclaimed) > REMEMBERED:
            del self._unclaimed[next(iter(self._unclaimed))]


def open_pidfd(pid: int, start_time: int) -> int | None:
    """A pidfd of exactly this process, also when it is a zombie; None when it is gone or another one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if procfs.start_time(pid) != start_time:
        os.close(fd)
        return None
    return fd


def exit_status_of(pidfd: int) -> int | None:
    """The status of an ended process that is not our child, where the kernel keeps it; 128 + signal when killed."""
    request = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError:
        return None  # an older kernel, or one whose parent has not reaped it yet
    mask, code = int(_INFO.unpack(request)[0]), int(_INFO.unpack(request)[-1])
    if not mask & _PIDFD_INFO_EXIT:
        return None
    return 128 + (code & 0x7F) if code & 0x7F else code >> 8 & 0xFF
