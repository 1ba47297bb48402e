"""What the machine offers, asked of the kernel itself and not read off version numbers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

INIT_INTERPRETER = Path("/usr/bin/python3")
INIT_MINIMUM = (3, 9)

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), which is 96 bytes
_PAGEMAP_SCAN_ARGUMENT = struct.Struct("=12Q")
_PROBE_DEADLINE = 10.0  # seconds


def has_userfaultfd() -> bool:
    """Whether this process may open a userfaultfd."""
    number = _USERFAULTFD.get(platform.machine())
    if number is None:
        return False
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        return False
    os.close(descriptor)
    return True


def has_pagemap_scan() -> bool:
    """Whether the kernel knows the PAGEMAP_SCAN request (6.7 and newer)."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        # An empty range is enough: a kernel that knows the request answers, or complains about the argument.
        argument = bytearray(_PAGEMAP_SCAN_ARGUMENT.pack(_PAGEMAP_SCAN_ARGUMENT.size, *[0] * 11))
        try:
            fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
        except OSError as error:
            return error.errno == errno.EINVAL
    return True


def namespaces_complaint() -> str:
    """Why a process in its own PID, mount and IPC namespaces cannot be started; empty when it can."""
    command = ["unshare", "--mount", "--propagation", "private", "--pid", "--ipc", "--fork", "--mount-proc", "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_DEADLINE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()


def init_interpreter() -> tuple[str, str]:
    """The interpreter that runs a session's first process, and its version ("3.11.2")."""
    command = [str(INIT_INTERPRETER), "-I", "-S", "-c", "import platform; print(platform.python_version())"]
    try:
        version = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_DEADLINE, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return sys.executable, platform.python_version()
    if tuple(int(part) for part in version.split(".")[:2]) < INIT_MINIMUM:
        return sys.executable, platform.python_version()
    return str(INIT_INTERPRETER), version


def direct_io_complaint(folder: Path) -> str:
    """Why the file system of `folder`, which exists, refuses direct I/O; empty when it takes it."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".torpor-probe-", dir=folder)
        os.close(descriptor)
        try:
            os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
        finally:
            os.unlink(name)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write on the file system of `folder`, which exists."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def existing(folder: Path) -> Path:
    """`folder`, or the nearest of its parents that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def memory() -> tuple[int, int]:
    """Total and available bytes of memory."""
    with open("/proc/meminfo") as lines:
        facts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return facts["MemTotal"], facts["MemAvailable"]


def gpu_driver() -> str:
    """The NVIDIA driver's own line about itself; empty where there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except FileNotFoundError:
        return ""
