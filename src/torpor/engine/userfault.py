"""The kernel's userfaultfd, as far as a page source needs it, and processes that share their table of descriptors."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
MESSAGE_BYTES = 32
PAGEFAULT, FORK, REMAP, REMOVE, UNMAP = 0x12, 0x13, 0x14, 0x15, 0x16

_WAKE = 2 << 30 | 16 << 16 | 0xAA << 8 | 0x02
_COPY = 3 << 30 | 40 << 16 | 0xAA << 8 | 0x03
_ZEROPAGE = 3 << 30 | 32 << 16 | 0xAA << 8 | 0x04
_LOWEST = 1 << 16
_ENDS = (1 << 56, 1 << 52, 1 << 48, 1 << 47, 1 << 32)  # where addresses end, less a page or two; the kernel knows which
_MESSAGE = struct.Struct("<B7xQQQ")
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_FILES = 0x400

_libc = ctypes.CDLL(None, use_errno=True)


class _Copy(ctypes.Structure):
    _fields_ = (
        ("dst", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("len", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("copy", ctypes.c_int64),
    )


class _Zeropage(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("len", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("zeropage", ctypes.c_int64),
    )


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("len", ctypes.c_uint64))


@dataclass(frozen=True)
class Message:
    """What happened: `event`, and its three numbers (for a fault: flags, address; see userfaultfd(2))."""

    event: int
    first: int
    second: int
    third: int


def parse(message: bytes | memoryview) -> Message:
    """The fields of 32 bytes that were read from a userfaultfd."""
    return Message(*_MESSAGE.unpack(message))


def read_into(uffd: int, address: int) -> bool:
    """Reads one message to `address`, without waiting; False when there is none.

    Once the kernel has given a message away it lies at `address`, even when this process is killed in the middle.
    """
    if _libc.read(uffd, ctypes.c_void_p(address), MESSAGE_BYTES) == MESSAGE_BYTES:
        return True
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return False
    raise OSError(code, os.strerror(code))


def copy(uffd: int, target: int, source: int, size: int) -> tuple[int, int]:
    """Puts `size` bytes from our address `source` at the other process's `target`, where there is nothing yet.

    Returns the bytes that went and 0, or an errno: EAGAIN (an event waits to be read), EEXIST (a page is there), ENOENT
    (no registered mapping there), ESRCH (the process is gone).
    """
    request = _Copy(target, source, size, 0, 0)
    if _libc.ioctl(uffd, ctypes.c_ulong(_COPY), ctypes.byref(request)) == 0:
        return size, 0
    return _partial(request.copy)


def zero(uffd: int, target: int, size: int) -> tuple[int, int]:
    """Puts zero pages at `target`; returns as `copy`."""
    request = _Zeropage(target, size, 0, 0)
    if _libc.ioctl(uffd, ctypes.c_ulong(_ZEROPAGE), ctypes.byref(request)) == 0:
        return size, 0
    return _partial(request.zeropage)


def wake(uffd: int, start: int, size: int) -> bool:
    """Makes threads that wait for a page of this range look again; False when no process has such addresses."""
    return bool(_libc.ioctl(uffd, ctypes.c_ulong(_WAKE), ctypes.byref(_Range(start, size))) == 0)


def wake_all(uffd: int) -> None:
    """Makes all threads look again. Raises OSError."""
    for end in _ENDS:
        if any(wake(uffd, _LOWEST, end - less * PAGE - _LOWEST) for less in (0, 1, 2)):
            return
    raise OSError(errno.EINVAL, "UFFDIO_WAKE of all addresses")


def clone_sharing_descriptors() -> int:
    """Like `os.fork`, but both processes have one table of descriptors: what one opens, also by receiving an event of a
    userfaultfd, stays open when that one dies. Only for a process with one thread. Raises OSError."""
    number = _CLONE[platform.machine()]
    call = ctypes.PyDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(call(ctypes.c_long(number), ctypes.c_ulong(_CLONE_FILES | signal.SIGCHLD), *[ctypes.c_ulong(0)] * 4))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    code = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, os.strerror(code), "clone")
    return pid


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Where a writable buffer lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _partial(done: int) -> tuple[int, int]:
    if done > 0:
        return done, errno.EAGAIN
    return 0, ctypes.get_errno()
