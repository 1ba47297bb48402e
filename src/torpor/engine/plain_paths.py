"""Opening what a path of a session names without being led elsewhere: no symbolic link is followed anywhere in it.

The kernel told these paths, so none of them led through a link when they were recorded; one that does now was put
there by somebody.
"""

from __future__ import annotations

import ctypes
import os

SYS_OPENAT2 = 437  # the same on every architecture
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS = 0x02, 0x04
AT_FDCWD = -100


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def open_plain(path: bytes, flags: int) -> int:
    """A descriptor of `path`. Raises OSError: ELOOP when a symbolic link is in the way, and the usual ones."""
    how = _How(flags | os.O_CLOEXEC, 0, RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS)
    opened = int(_libc.syscall(SYS_OPENAT2, AT_FDCWD, path, ctypes.byref(how), ctypes.sizeof(how)))
    if opened < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(path))
    return opened
