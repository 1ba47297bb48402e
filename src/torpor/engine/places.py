"""Where CRIU makes things while it restores a session: only where the session's user could, and through no link.

CRIU works as root, and its images hold paths that the user may have exchanged since: a deleted file is made again for
a moment, a socket is bound to its name, a working folder gets its owner. So during a restore no symbolic link is
followed on the session's mounts (`nosymfollow`, which the kernel enforces whoever is faster); the paths that it told
lead through none. A socket's name, which its program chose, may: it is replaced by where it leads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import threading
from pathlib import Path

from torpor.engine.files_images import MOUNT_POINT, helpers, nameless
from torpor.engine.images import FILES
from torpor.engine.plain_paths import open_plain
from torpor.engine.protobuf import Field, entries_of, entry, fields_of, packed
from torpor.errors import Conflict, EngineError, Incompatible
from torpor.model import Caller

MOUNT_FLAGS = 5  # of an entry of `images/mnt.proto`
MS_NOSYMFOLLOW = 0x100
ROOTS_OWN = ("proc", "sys", "dev", "dev/pts")  # nobody else can lay links there, and CRIU needs those that are there
IS_UNIX_SOCKET = b"\x08\x05"  # how an entry of FILES begins when its descriptor is a unix socket (fd_types.UNIXSK)
UNIX_SOCKET = 16  # its field in the entry; below are fields of `images/sk-unix.proto`
NAME = 11
NAME_LIMIT = 107  # bytes
SESSIONS_OWN = b"/dev/shm/"  # not the node's: what leads there through links is refused when it is saved
CLONE_FS, CLONE_NEWNS = 0x200, 0x20000
SYS_MOUNT_SETATTR = 442  # the same on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_NOSYMFOLLOW = 0x200000

_libc = ctypes.CDLL(None, use_errno=True)


def guard(folder: Path, caller: Caller) -> None:
    """Rewrites the images in `folder`, so that CRIU follows no link; `let_follow` ends that for the restored session.

    Raises Incompatible when something that has to be made again would be made elsewhere.
    """
    for place, mode in sorted(nameless(folder).items()):
        _require_plain(place, mode)
    _lead_sockets(folder, caller)
    for image in folder.glob("mountpoints-*.img"):
        content = image.read_bytes()
        image.write_bytes(b"".join([content[:8], *(entry(_guarded(body)) for body in entries_of(content))]))


def require_helpers(folder: Path) -> None:
    """Raises Conflict when a name that CRIU made while it saved is not where the kernel had said."""
    for name in helpers(folder):
        if name.startswith(SESSIONS_OWN):
            continue  # what CRIU saw there is not to be seen from here, and is saved with the session
        try:
            parent = open_plain(os.path.dirname(name), os.O_PATH | os.O_DIRECTORY)
        except OSError:
            found = False
        else:
            found = _exists(os.path.basename(name), parent)
            os.close(parent)
        if not found:
            raise Conflict(
                f"{os.fsdecode(os.path.dirname(name))} was exchanged while the session was being saved.",
                safe="It goes on running.",
                hint="Try again.",
            )


def let_follow(pid: int) -> None:
    """Lets the restored session, which does not run yet, follow links again. Raises EngineError."""
    failure: list[OSError] = []

    def work() -> None:
        try:
            _follow_again(pid)
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="torpor-mounts")  # it alone enters the session's mounts, and ends there
    thread.start()
    thread.join()
    if failure:
        raise EngineError(f"The session's mounts could not be opened for links again: {failure[0]}.")


def _follow_again(pid: int) -> None:
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.unshare(CLONE_FS))
        _check(_libc.setns(namespace, CLONE_NEWNS))
        attributes = (ctypes.c_uint64 * 4)(0, MOUNT_ATTR_NOSYMFOLLOW, 0, 0)  # set, clear, propagation, user namespace
        size = ctypes.sizeof(attributes)
        _check(_libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size))
    finally:
        os.close(namespace)


def _guarded(body: bytes) -> bytes:
    fields = list(fields_of(body))
    place = os.fsdecode(_bytes(dict(fields)[MOUNT_POINT])).removeprefix("/")
    if place in ROOTS_OWN or place.startswith(("proc/", "sys/")):
        return body
    return packed((number, _flagged(value) if number == MOUNT_FLAGS else value) for number, value in fields)


def _flagged(value: Field) -> int:
    assert isinstance(value, int)
    return value | MS_NOSYMFOLLOW


def _require_plain(place: bytes, mode: int) -> None:
    """What had no name any more gets one for a moment. A folder would take over whatever it finds there."""
    name = os.fsdecode(place)
    kept = {"safe": "Nothing was followed, and its checkpoint is kept."}
    try:
        parent = open_plain(os.path.dirname(place), os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.ELOOP:
            return  # gone: CRIU says so, and makes nothing
        raise Incompatible(
            f"{name} had been deleted while the session used it, and the way there leads through a link now.",
            hint="Put the folders back that were there, and resume it again.",
            **kept,
        ) from error
    try:
        if stat.S_ISDIR(mode) and _exists(os.path.basename(place), parent):
            raise Incompatible(
                f"The folder {name} had been deleted while the session worked in it, and there is another {name} now.",
                hint="Move that one away, and resume it again.",
                **kept,
            )
    finally:
        os.close(parent)


def _exists(name: bytes, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _lead_sockets(folder: Path, caller: Caller) -> None:
    content = (folder / FILES).read_bytes()
    parts = [content[:8]]
    for body in entries_of(content):
        if body.startswith(IS_UNIX_SOCKET):
            fields = list(fields_of(body))
            body = packed((number, _led(value, caller) if number == UNIX_SOCKET else value) for number, value in fields)
        parts.append(entry(body))
    (folder / FILES).write_bytes(b"".join(parts))


def _led(description: Field, caller: Caller) -> Field:
    fields = list(fields_of(_bytes(description)))
    return packed((number, _real_name(_bytes(value), caller) if number == NAME else value) for number, value in fields)


def _real_name(name: bytes, caller: Caller) -> bytes:
    """Where a socket's name leads, if through links: there, its user could have made the socket, too.

    Names that are relative begin at a folder that the kernel told; those in no folder begin with a zero byte.
    """
    path = name.rstrip(b"\0")
    if not path.startswith(b"/") or path.startswith(SESSIONS_OWN):
        return name
    parent = os.path.realpath(os.path.dirname(path))
    if parent == os.path.dirname(path):
        return name
    real = os.path.join(parent, os.path.basename(path))
    if len(real) > NAME_LIMIT or not _may_make_files(parent, caller):
        raise Incompatible(
            f"The session's socket {os.fsdecode(path)} would be made at {os.fsdecode(real)} now, and cannot be.",
            safe="Nothing was followed, and its checkpoint is kept.",
            hint="Put the folders back that were there, and resume it again.",
        )
    return real + name[len(path) :]


def _may_make_files(folder: bytes, caller: Caller) -> bool:
    groups = f"--groups={','.join(map(str, caller.groups))}" if caller.groups else "--clear-groups"
    identity = ["setpriv", f"--reuid={caller.uid}", f"--regid={caller.gid}", groups, "--inh-caps=-all"]
    asked = subprocess.run([*identity, "test", "-w", folder, "-a", "-x", folder], cwd="/", check=False)
    return asked.returncode == 0


def _bytes(value: Field) -> bytes:
    assert isinstance(value, bytes)
    return value


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
