"""Files written and read past the page cache: page-aligned buffers, O_DIRECT, durable folders."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torpor.errors import StoreError

PAGE = 4096
"""Everything in a pack starts on a multiple of this, which every block device accepts for direct I/O."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def padded(length: int) -> int:
    """`length` rounded up to whole pages."""
    return (length + PAGE - 1) & -PAGE


def new_buffer(size: int) -> memoryview:
    """A page-aligned writable buffer of `size` bytes; touched pages stay with it, so keep it and use it again."""
    return memoryview(mmap.mmap(-1, size))


def address(view: memoryview) -> int:
    """Where a writable, contiguous, non-empty view lies in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def accepts_direct(folder: Path, readable: Path) -> bool:
    """Whether files in `folder` can be written and read with O_DIRECT: tried with one page, or, where nothing can be
    written now (a full disk must still give its bytes), by opening the file `readable`. Raises OSError."""
    probe = folder / os.urandom(16).hex()
    page = new_buffer(PAGE)
    try:
        try:
            with opened(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT) as fd:
                write_fully(fd, page, 0)
                read_fully(fd, page, 0)
        except OSError as error:
            if error.errno not in _NO_ROOM | {errno.EROFS}:
                raise
            with opened(readable, os.O_RDONLY | os.O_DIRECT):
                pass
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        return False
    return True


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor of `path`, closed afterwards; a file made here is the owner's only (0600)."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def write_fully(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def read_fully(fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from `offset`. Raises OSError, also when the file ends before."""
    while into:
        got = os.preadv(fd, [into], offset)
        if got == 0:
            raise OSError(errno.EIO, "the file ends too early")
        into, offset = into[got:], offset + got


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises OSError."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def store_error(error: OSError, what: str) -> StoreError:
    """The StoreError for a failed system call; `what` says in a few words what could not be done."""
    if error.errno in _NO_ROOM:
        return StoreError(
            f"{what}: there is no room left ({os.strerror(error.errno or 0)}).",
            safe="Everything stored before is untouched.",
            hint="Free space on the store's disk, remove checkpoints that nobody needs, and try again.",
        )
    return StoreError(f"{what}: {error.strerror or error}.", safe="Everything stored before is untouched.")
