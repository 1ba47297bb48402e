"""A session's own /dev/shm, saved and laid out again: names, owners, modes, links, and content with its holes.

CRIU would pack it with `tar` and gzip; content that goes straight into the store is chunked and deduplicated
like memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from torpor.errors import IntegrityError, PreflightRefused

SEGMENT = 8 << 20
BLOCK = 256 << 10
PATH_LIMIT = 3500  # bytes
DEPTH_LIMIT = 200

Put = Callable[[memoryview, list[int]], list[bytes]]
Read = Callable[[list[bytes], memoryview, list[int]], None]


class Node(msgspec.Struct, frozen=True):
    """One file, folder, symbolic link or FIFO. `path` is relative; `extents` are (offset, bytes) that hold data.

    `raw`: one of the names is no text, so each character of them stands for a byte.
    """

    path: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    extents: tuple[tuple[int, int], ...] = ()
    target: str | None = None  # of a symbolic link
    same_as: str | None = None  # another name of a file that came earlier
    attributes: dict[str, bytes] = {}
    raw: bool = False


class SavedTree(msgspec.Struct):
    """What `save` returns: the nodes, and the chunks of all their content in order."""

    nodes: list[Node]
    ids: list[bytes]
    lengths: list[int]


def save(root: Path, put: Put, segment: memoryview, *, only: Collection[str] | None = None) -> SavedTree:
    """Stores everything below `root` (a frozen session's folder: nothing changes meanwhile), or `only` these files
    with the folders that they are in.

    No symbolic link is followed and no mount crossed. Sockets are left to CRIU. `segment` is scratch of SEGMENT bytes.
    Raises OSError, PreflightRefused for what could not be laid out again, and whatever `put` raises.
    """
    saved = SavedTree([], [], [])
    seen: dict[int, str] = {}
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        device = os.fstat(top).st_dev
        saved.nodes.append(_node(top, ".", os.fstat(top), {}))
        for folder, names, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            for name in sorted([*names, *files]):
                facts = os.stat(name, dir_fd=at, follow_symlinks=False)
                if facts.st_dev != device or stat.S_ISSOCK(facts.st_mode):
                    continue
                path = os.path.normpath(os.path.join(folder, name))
                if only is not None and not any(f"{one}/".startswith(f"{path}/") for one in only):
                    continue
                _require_short(path)
                node = _save_one(at, name, path, facts, seen, saved, put, segment)
                saved.nodes.append(_storable(node))
    finally:
        os.close(top)
    return saved


def lay_out(root: Path, nodes: list[Node], ids: list[bytes], lengths: list[int], read: Read) -> None:
    """Rebuilds a saved tree in the empty folder `root`, which nobody else can reach yet.

    Raises IntegrityError when the nodes and the chunks do not fit together, and whatever `read` raises.
    """
    chunks = _Chunks(ids, lengths, read)
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for node in map(_as_named, nodes):
            path = _checked(node.path)
            if stat.S_ISDIR(node.mode):
                if path != ".":
                    os.mkdir(path, dir_fd=top)
            elif node.same_as is not None:
                os.link(_checked(node.same_as), path, src_dir_fd=top, dst_dir_fd=top)
                continue
            elif node.target is not None:
                os.symlink(node.target, path, dir_fd=top)
            elif stat.S_ISFIFO(node.mode):
                os.mkfifo(path, dir_fd=top)
            else:
                _write_file(top, node, chunks)
            _dress(top, node)
        for node in map(_as_named, nodes):
            if stat.S_ISDIR(node.mode):
                os.utime(node.path, ns=(node.mtime_ns, node.mtime_ns), dir_fd=top)
    finally:
        os.close(top)
    if not chunks.exhausted:
        raise IntegrityError("The checkpoint's /dev/shm holds more bytes than its files need.")


def remove(root: Path, nodes: list[Node]) -> None:
    """Removes saved files from where they were, as far as they are still the same; folders only when empty."""
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for node in reversed(nodes):
            with contextlib.suppress(FileNotFoundError):
                facts = os.stat(node.path, dir_fd=top, follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    with contextlib.suppress(OSError):  # something else is in it, or it is the root itself
                        os.rmdir(node.path, dir_fd=top)
                elif (facts.st_mode, facts.st_size, facts.st_mtime_ns) == (node.mode, node.size, node.mtime_ns):
                    os.unlink(node.path, dir_fd=top)
    finally:
        os.close(top)


class _Chunks:
    """Hands out the content in order, never more than a segment at once."""

    def __init__(self, ids: list[bytes], lengths: list[int], read: Read) -> None:
        self._ids, self._lengths, self._read = ids, lengths, read
        self._next = 0

    @property
    def exhausted(self) -> bool:
        return self._next == len(self._ids)

    def pieces(self, size: int) -> Iterator[bytes | memoryview]:
        while size > 0:
            first, total = self._next, 0
            while self._next < len(self._ids) and total < min(size, SEGMENT):
                total += self._lengths[self._next]
                self._next += 1
            if total == 0 or total > size:
                raise IntegrityError("The checkpoint's /dev/shm does not hold the bytes that its files need.")
            buffer = memoryview(bytearray(total))
            self._read(self._ids[first : self._next], buffer, self._lengths[first : self._next])
            yield buffer
            size -= total


def _save_one(
    at: int,
    name: str,
    path: str,
    facts: os.stat_result,
    seen: dict[int, str],
    saved: SavedTree,
    put: Put,
    segment: memoryview,
) -> Node:
    if stat.S_ISLNK(facts.st_mode):
        node = _node(None, path, facts, {})
        return msgspec.structs.replace(node, target=os.readlink(name, dir_fd=at))
    if stat.S_ISREG(facts.st_mode):
        if facts.st_ino in seen:
            return msgspec.structs.replace(_node(None, path, facts, {}), same_as=seen[facts.st_ino])
        if facts.st_nlink > 1:
            seen[facts.st_ino] = path
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        try:
            extents = tuple(_extents(opened, facts.st_size))
            for offset, size in extents:
                _store(opened, offset, size, saved, put, segment)
            return msgspec.structs.replace(_node(opened, path, facts, {}), size=facts.st_size, extents=extents)
        finally:
            os.close(opened)
    return _node(None, path, facts, {})


def _node(opened: int | None, path: str, facts: os.stat_result, attributes: dict[str, bytes]) -> Node:
    if opened is not None:
        attributes = {name: os.getxattr(opened, name) for name in os.listxattr(opened)}
    return Node(
        path=path,
        mode=facts.st_mode,
        uid=facts.st_uid,
        gid=facts.st_gid,
        mtime_ns=facts.st_mtime_ns,
        attributes=attributes,
    )


def _extents(opened: int, size: int) -> Iterator[tuple[int, int]]:
    offset = 0
    while offset < size:
        try:
            start = os.lseek(opened, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        offset = os.lseek(opened, start, os.SEEK_HOLE)
        yield start, offset - start


def _store(opened: int, offset: int, size: int, saved: SavedTree, put: Put, segment: memoryview) -> None:
    end = offset + size
    while offset < end:
        wanted = min(end - offset, SEGMENT - offset % BLOCK)
        got = os.preadv(opened, [segment[:wanted]], offset)
        if got == 0:
            raise OSError(f"a file of the session's /dev/shm ended at {offset} instead of {end}")
        cuts = [*range(BLOCK - offset % BLOCK, got, BLOCK), got]
        saved.ids += put(segment[:got], cuts)
        saved.lengths += [cut - start for start, cut in zip([0, *cuts], cuts, strict=False)]
        offset += got


def _write_file(top: int, node: Node, chunks: _Chunks) -> None:
    opened = os.open(node.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=top)
    try:
        os.ftruncate(opened, node.size)
        for start, size in node.extents:
            offset = start
            for piece in chunks.pieces(size):
                offset += os.pwrite(opened, piece, offset)
    finally:
        os.close(opened)


def _dress(top: int, node: Node) -> None:
    os.chown(node.path, node.uid, node.gid, dir_fd=top, follow_symlinks=False)
    if node.target is None:
        os.chmod(node.path, stat.S_IMODE(node.mode), dir_fd=top)
        for name, value in node.attributes.items():
            os.setxattr(f"/proc/self/fd/{top}/{node.path}", name, value)
    os.utime(node.path, ns=(node.mtime_ns, node.mtime_ns), dir_fd=top, follow_symlinks=False)


def _checked(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise IntegrityError(f"The checkpoint names a file outside of its folder: {path!r}.")
    return path


def _storable(node: Node) -> Node:
    """Names as the system gave them, with its marks for bytes that are no text, become names that can be stored."""
    try:
        "".join(name for name in (node.path, node.target, node.same_as) if name).encode()
    except UnicodeEncodeError:
        return _renamed(node, lambda name: os.fsencode(name).decode("latin-1"), raw=True)
    return node


def _as_named(node: Node) -> Node:
    return _renamed(node, lambda name: os.fsdecode(name.encode("latin-1")), raw=False) if node.raw else node


def _renamed(node: Node, rename: Callable[[str], str], *, raw: bool) -> Node:
    target, same_as = (None if name is None else rename(name) for name in (node.target, node.same_as))
    return msgspec.structs.replace(node, path=rename(node.path), target=target, same_as=same_as, raw=raw)


def _require_short(path: str) -> None:
    if len(os.fsencode(path)) > PATH_LIMIT or path.count("/") > DEPTH_LIMIT:
        raise PreflightRefused(
            f"The session's /dev/shm is more than {DEPTH_LIMIT} folders deep, or has names that are too long together.",
            safe="It goes on running.",
            hint="Remove those folders, then try again.",
        )
