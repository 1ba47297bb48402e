"""The files that a session has open or mapped: what each was when the session was saved, and how it is used.

They are not part of a checkpoint, so they may change while the session is away. What was recorded here decides
then (`files_fate.py`) with what the session goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torpor.engine import procfs

NOT_ON_DISK = (b"/proc/", b"/dev/shm/", b"/dev/pts/", b"/memfd:", b"/SYSV", b"/dev/zero")
GONE = b" (deleted)"
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe"}
O_ACCMODE = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([A-Za-z0-9_]+)")


class Use(msgspec.Struct):
    """How a session uses a file: mapped (also as a running program), read, only ever appended to, written to."""

    mapped: bool = False
    reads: bool = False
    appends: bool = False
    writes: bool = False

    def add(self, other: Use) -> None:
        """Takes in another use of the same file."""
        self.mapped |= other.mapped
        self.reads |= other.reads
        self.appends |= other.appends
        self.writes |= other.writes


class OpenFile(msgspec.Struct):
    """One file, folder or named pipe. `path` is what the session calls it; sizes in bytes, times in nanoseconds.

    `digest` is the BLAKE3 of a file's content, where it was read. `kept` is the name of the checkpoint's object that
    holds the content, `pinned` that of a file in the folder of pinned files; both are empty when there is no copy.
    """

    path: bytes
    kind: str
    dev: int
    ino: int
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    use: Use
    build_id: str = ""
    digest: bytes = b""
    kept: str = ""
    pinned: str = ""

    @property
    def name(self) -> str:
        """The path as text for people."""
        return os.fsdecode(self.path).encode(errors="replace").decode()

    @property
    def package(self) -> str:
        """The Python package that the file was installed with; empty when it is in none."""
        found = _PACKAGE.search(self.name)
        return found.group(1) if found else ""

    @property
    def identity(self) -> tuple[int, int, int, int, int]:
        """Changes whenever the content may have changed."""
        return self.dev, self.ino, self.size, self.mtime_ns, self.ctime_ns


class Mount(msgspec.Struct, frozen=True):
    """A place where a file system is mounted."""

    path: str
    kind: str


def survey(init_pid: int, *, ours: Path) -> list[OpenFile]:
    """What the tree below `init_pid` has open or mapped, has as working directory, or runs, sorted by path.

    Not: the session's own folder (`ours`) and what is in memory only, both with what is in them, and what has no name
    any more (CRIU saves that).
    A process that ends meanwhile is left out.
    """
    found: dict[bytes, OpenFile] = {}
    own = os.fsencode(ours) + b"/"
    for pid in procfs.tree(init_pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for path, facts, use in [*_mapped(pid), *_opened(pid), *_folders(pid)]:
                kind = KINDS.get(stat.S_IFMT(facts.st_mode))
                if kind is None or (path + b"/").startswith((own, *NOT_ON_DISK)) or _is_gone(path, facts):
                    continue
                if path in found:
                    found[path].use.add(use)
                else:
                    found[path] = _describe(path, kind, facts, use)
    return [found[path] for path in sorted(found)]


def mounts(pid: int | str = "self") -> list[Mount]:
    """The mounts that a process sees."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    fields = [line.split(" ") for line in lines]
    return [Mount(_unescaped(one[4]), one[one.index("-") + 1]) for one in fields]


def mount_of(path: str, table: list[Mount]) -> Mount:
    """Where `path` is; the last of several mounts at one place hides the others."""
    inside = [mount for mount in table if path == mount.path or path.startswith(mount.path.rstrip("/") + "/")]
    longest = max(len(mount.path) for mount in inside)
    return [mount for mount in inside if len(mount.path) == longest][-1]


def _is_gone(path: bytes, facts: os.stat_result) -> bool:
    """The kernel's mark for a file without a name: a file may also be called so."""
    if not path.endswith(GONE):
        return False
    try:
        found = os.lstat(path)
    except OSError:
        return True
    return (found.st_dev, found.st_ino) != (facts.st_dev, facts.st_ino)


def _mapped(pid: int) -> Iterator[tuple[bytes, os.stat_result, Use]]:
    seen = set()
    with open(f"/proc/{pid}/maps", "rb") as lines:
        for line in lines:
            span, access, _, device, inode, *rest = line.split(maxsplit=5)
            writes = access[3:4] == b"s" and b"w" in access
            key = (device, inode, tuple(rest), writes)
            if inode == b"0" or not rest or not rest[0].startswith(b"/") or key in seen:
                continue
            seen.add(key)
            link = f"/proc/{pid}/map_files/{_normal(span)}"
            yield os.readlink(os.fsencode(link)), os.stat(link), Use(mapped=True, writes=writes)


def _normal(span: bytes) -> str:
    start, _, end = span.decode().partition("-")
    return f"{int(start, 16):x}-{int(end, 16):x}"


def _opened(pid: int) -> Iterator[tuple[bytes, os.stat_result, Use]]:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            link = os.readlink(f"/proc/{pid}/fd/{number}".encode())
            if link.startswith(b"/"):
                flags = _flags(Path(f"/proc/{pid}/fdinfo/{number}").read_text(encoding="ascii", errors="replace"))
                yield link, os.stat(f"/proc/{pid}/fd/{number}"), _use(flags)


def _folders(pid: int) -> Iterator[tuple[bytes, os.stat_result, Use]]:
    for name in ("cwd", "exe"):
        link = f"/proc/{pid}/{name}"
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(link.encode()), os.stat(link), Use(mapped=name == "exe")


def _flags(fdinfo: str) -> int:
    found = re.search(r"^flags:\s*(\d+)", fdinfo, re.MULTILINE)
    return int(found.group(1), 8) if found else os.O_RDWR


def _use(flags: int) -> Use:
    access = flags & O_ACCMODE
    changes, appends = access != os.O_RDONLY, bool(flags & os.O_APPEND)
    return Use(reads=access != os.O_WRONLY, appends=changes and appends, writes=changes and not appends)


def _describe(path: bytes, kind: str, facts: os.stat_result, use: Use) -> OpenFile:
    return OpenFile(
        path=path,
        kind=kind,
        dev=facts.st_dev,
        ino=facts.st_ino,
        size=facts.st_size if kind == "file" else 0,
        mode=facts.st_mode,
        uid=facts.st_uid,
        gid=facts.st_gid,
        mtime_ns=facts.st_mtime_ns,
        ctime_ns=facts.st_ctime_ns,
        use=use,
    )


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)
