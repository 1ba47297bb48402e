"""A worker's own mount namespace: what is mounted here is seen by nobody else and vanishes with the worker."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MS_NOSUID, MS_NODEV = 0x2, 0x4

_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Moves the calling (single-threaded) process into a private copy of its mount namespace. Raises OSError."""
    if _libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS)")
    _mount(None, Path("/"), None, MS_REC | MS_PRIVATE)


def tmpfs(target: Path, *, options: str = "mode=0700") -> None:
    """Mounts an empty tmpfs on `target`."""
    _mount("torpor", target, "tmpfs", MS_NOSUID | MS_NODEV, options)


def bind_root(target: Path) -> None:
    """Makes the whole tree of mounts visible below `target`, which CRIU needs as a restored session's root."""
    _mount("/", target, None, MS_BIND | MS_REC)
    _mount(None, target, None, MS_REC | MS_PRIVATE)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    if _libc.mount(encoded(source), os.fsencode(target), encoded(kind), flags, encoded(options)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))
