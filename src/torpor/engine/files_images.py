"""Telling CRIU's images what became of the files: other names, other sizes, and contents that only the session sees.

CRIU itself refuses a file whose size, mode or build id is not the one it saved; what was judged here instead
(`files_fate.py`) is written into its images, and everything else it goes on checking. A content that only the session
sees becomes a file without a name, like one that was deleted while it was open: layouts of `images/regfile.proto`,
`remap-file-path.proto` and `ghost-file.proto` (MIT), magic numbers of `criu/include/magic.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torpor.engine.images import FILES, IMG_COMMON_MAGIC
from torpor.engine.protobuf import Field, entries_of, entry, fields_of, packed

REMAP = "remap-fpath.img"
REMAP_MAGIC, GHOST_MAGIC = 0x59133954, 0x52583605
GHOST = 1  # remap_type
IS_REGULAR = b"\x08\x01"  # how an entry of FILES begins that names a file, folder or named pipe (fd_types.REG)
REGULAR = 3  # its field in the entry
ID, NAME, SIZE, MODE = 1, 6, 8, 10  # fields of that


@dataclass(frozen=True)
class Ghost:
    """A content that only the session sees; `write` puts it into the image."""

    uid: int
    gid: int
    mode: int
    mtime_ns: int
    write: Callable[[BinaryIO], None]


@dataclass(frozen=True)
class Rewrite:
    """What to change of every open or mapped instance of one path; None = leave it."""

    name: bytes | None = None
    size: int | None = None
    mode: int | None = None
    ghost: Ghost | None = None


def rewrite(folder: Path, wanted: Mapping[bytes, Rewrite]) -> None:
    """Changes the images in `folder`. Files that have no name already are not touched. Raises OSError."""
    remap = folder / REMAP
    remaps = remap.read_bytes() if remap.exists() else struct.pack("<II", IMG_COMMON_MAGIC, REMAP_MAGIC)
    nameless = {dict(fields_of(body))[ID] for body in entries_of(remaps)}
    ghosts: dict[bytes, int] = {}
    content = (folder / FILES).read_bytes()
    parts = [content[:8]]
    for body in entries_of(content):
        facts = _regular(body)
        name = facts.get(NAME)
        change = wanted.get(name) if isinstance(name, bytes) and facts[ID] not in nameless else None
        if change is None or not isinstance(name, bytes):
            parts.append(entry(body))
            continue
        parts.append(entry(packed((number, _changed(number, value, change)) for number, value in fields_of(body))))
        if change.ghost is not None:
            if name not in ghosts:
                ghosts[name] = _next_ghost(folder)
                _write_ghost(folder / _ghost_name(ghosts[name]), change.ghost)
            remaps += entry(packed([(1, facts[ID]), (2, ghosts[name]), (3, GHOST)]))
    (folder / FILES).write_bytes(b"".join(parts))
    if ghosts:
        remap.write_bytes(remaps)


def _regular(body: bytes) -> dict[int, Field]:
    """What an entry of FILES tells of a file; nothing when it is of something else."""
    if not body.startswith(IS_REGULAR):
        return {}
    told = dict(fields_of(body))[REGULAR]
    return dict(fields_of(told)) if isinstance(told, bytes) else {}


def _changed(number: int, value: Field, change: Rewrite) -> Field:
    if number != REGULAR or not isinstance(value, bytes):
        return value
    new = {NAME: change.name, SIZE: change.size, MODE: change.mode}
    changed = ((field, new.get(field), old) for field, old in fields_of(value))
    return packed((field, old if wanted is None else wanted) for field, wanted, old in changed)


def _next_ghost(folder: Path) -> int:
    number = 1
    while (folder / _ghost_name(number)).exists():
        number += 1
    return number


def _ghost_name(number: int) -> str:
    return f"ghost-file-{number:x}.img"


def _write_ghost(path: Path, ghost: Ghost) -> None:
    seconds, nanoseconds = divmod(ghost.mtime_ns, 1_000_000_000)
    time = packed([(1, seconds), (2, nanoseconds // 1000)])
    facts = packed([(1, ghost.uid), (2, ghost.gid), (3, ghost.mode), (7, time), (8, time)])
    with open(path, "xb") as image:
        image.write(struct.pack("<II", IMG_COMMON_MAGIC, GHOST_MAGIC) + entry(facts))
        image.flush()
        ghost.write(image)
