"""Copies of open files: small ones go into the checkpoint, large libraries are pinned where that costs nothing.

Contents are read before the session is frozen; what changed until then is read again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from torpor.engine.files import OpenFile
from torpor.engine.filetree import BLOCK, SEGMENT
from torpor.engine.plain_paths import open_plain
from torpor.store import Object

STORED_UP_TO = 64 << 20  # bytes of one file
STILL = 2.0  # seconds since the last change, after which the next one shows in a file's time
FICLONE = 0x40049409
OBJECT = "files/"
CLONE, LINK = "clone-", "link-"  # how the name of a pinned file begins: a copy of its own, or another name
_ELF = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
PT_NOTE, NT_GNU_BUILD_ID = 4, 3

Put = Callable[[memoryview, list[int]], list[bytes]]
Identity = tuple[int, int, int, int, int]


class FileKeeper:
    """Keeps files for one checkpoint; `objects` are those that its manifest must name."""

    def __init__(self, put: Put, pins: Path, earlier: Iterable[OpenFile], objects: Mapping[str, Object]) -> None:
        """`earlier` (settled ones) and `objects` are of a verified checkpoint of the same session: what did not change
        is not read again. `pins` is the folder of this checkpoint's pinned files, made when it is needed."""
        self.objects: dict[str, Object] = {}
        self._put = put
        self._pins = pins
        self._earlier_objects = objects
        self._known: dict[Identity, OpenFile] = {one.identity: one for one in earlier if one.kept or one.build_id}
        self._started = time.time()
        self._buffer = memoryview(bytearray(min(SEGMENT, STORED_UP_TO)))

    def keep(self, files: Iterable[OpenFile]) -> None:
        """Sets `digest`, `kept` and `build_id` of each file as far as it can be kept.

        Raises what `put` raises. A file that cannot be read is not kept.
        """
        for file in files:
            if file.kind != "file" or self._is_known(file):
                continue
            with contextlib.suppress(OSError), _same(file) as opened:
                if file.size <= STORED_UP_TO:
                    self._store(file, opened)
                else:
                    file.build_id = build_id(opened)
            if is_settled(file, self._started):
                self._known[file.identity] = file

    def pin(self, files: Iterable[OpenFile]) -> None:
        """Sets `pinned` of each mapped file that was too large to be kept, where pinning it is possible."""
        for file in files:
            if file.kind == "file" and not file.kept and file.use.mapped and not file.use.writes:
                with contextlib.suppress(OSError):
                    self._pin(file)

    def undo(self) -> None:
        """Removes what was pinned."""
        shutil.rmtree(self._pins, ignore_errors=True)

    def _is_known(self, file: OpenFile) -> bool:
        known = self._known.get(file.identity)
        if known is None:
            return False
        if known.kept and known.kept not in self.objects:
            if known.kept not in self._earlier_objects:
                return False
            self.objects[known.kept] = self._earlier_objects[known.kept]
        file.digest, file.build_id, file.kept = known.digest, known.build_id, known.kept
        return True

    def _store(self, file: OpenFile, opened: int) -> None:
        ids: list[bytes] = []
        lengths: list[int] = []
        digest, offset = blake3(), 0
        while got := os.preadv(opened, [self._buffer], offset):
            piece = self._buffer[:got]
            cuts = [*range(BLOCK, got, BLOCK), got]
            digest.update(piece)
            ids += self._put(piece, cuts)
            lengths += [cut - start for start, cut in zip([0, *cuts], cuts, strict=False)]
            offset += got
        if offset == file.size and _identity(os.fstat(opened)) == file.identity:
            file.digest = digest.digest()
            file.kept = OBJECT + file.digest.hex()
            self.objects[file.kept] = Object(size=offset, chunks=b"".join(ids), lengths=lengths)

    def _pin(self, file: OpenFile) -> None:
        """A copy that shares its blocks, or else another name: it survives that the file is replaced or removed."""
        self._pins.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{file.dev:x}-{file.ino:x}"
        with _same(file) as opened:
            if _clone(opened, self._pins / (CLONE + name), file.mtime_ns):
                file.pinned = CLONE + name
            else:
                _link(opened, self._pins / (LINK + name))
                file.pinned = LINK + name


def is_settled(file: OpenFile, read: float) -> bool:
    """Whether a file that was read at that time (seconds since the epoch) is the same while its facts are.

    A change right after another may leave the time of the change as it is, and one through a mapping often does.
    """
    return not (file.use.mapped and file.use.writes) and file.mtime_ns < (read - STILL) * 1e9


def release_nameless(pins: Path) -> None:
    """Gives up links to files that have no other name any more, in all folders of one session's pinned files.

    The session runs and has them open; CRIU saves an open file without a name whole, but one with a foreign name
    only where it can give it a name in its old folder.
    """
    links = list(pins.glob(f"*/{LINK}*"))
    for path in links:
        if path.stat().st_nlink <= sum(one.name == path.name for one in links):
            for one in pins.glob(f"*/{path.name}"):
                one.unlink()


def build_id(opened: int) -> str:
    """The id that the linker gave a 64-bit ELF file; empty when it has none."""
    head = os.pread(opened, _ELF.size, 0)
    if len(head) < _ELF.size or head[:6] != b"\x7fELF\x02\x01":
        return ""
    _, _, _, _, _, table, _, _, _, size, count, *_ = _ELF.unpack(head)
    for number in range(count):
        header = os.pread(opened, _SEGMENT_HEADER.size, table + number * size)
        if len(header) == _SEGMENT_HEADER.size:
            kind, _, offset, _, _, length, _, _ = _SEGMENT_HEADER.unpack(header)
            if kind == PT_NOTE and (found := _build_id_note(os.pread(opened, min(length, 1 << 16), offset))):
                return found.hex()
    return ""


def digest_of(opened: int, size: int) -> bytes:
    """BLAKE3 of the first `size` bytes of a file."""
    digest, offset = blake3(), 0
    while offset < size and (piece := os.pread(opened, min(SEGMENT, size - offset), offset)):
        digest.update(piece)
        offset += len(piece)
    return digest.digest()


def _build_id_note(notes: bytes) -> bytes:
    position = 0
    while position + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, position)
        content = position + 12 + (name_size + 3 & ~3)
        if kind == NT_GNU_BUILD_ID and notes[position + 12 : position + 16] == b"GNU\0":
            return notes[content : content + size]
        position = content + (size + 3 & ~3)
    return b""


@contextlib.contextmanager
def _same(file: OpenFile) -> Iterator[int]:
    """The file that was recorded, opened. Raises OSError when something else is there."""
    opened = open_plain(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        facts = os.fstat(opened)
        if not stat.S_ISREG(facts.st_mode) or _identity(facts) != file.identity:
            raise FileNotFoundError(file.name)
        yield opened
    finally:
        os.close(opened)


def _identity(facts: os.stat_result) -> Identity:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _link(opened: int, target: Path) -> None:
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(opened), target, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def _clone(opened: int, target: Path, mtime_ns: int) -> bool:
    copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.ioctl(copy, FICLONE, opened)
        os.utime(copy, ns=(mtime_ns, mtime_ns))
        return True
    except OSError:
        target.unlink()
        return False
    finally:
        os.close(copy)
