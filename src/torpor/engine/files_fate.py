"""What becomes of each file that a session had open, when the session comes back: looked at, then judged.

`look` reads as little as it can: a file with the same inode, size and time is the same. `judge` is a pure function.
Nothing that was changed by somebody else is ever written over, and a session never goes on with other bytes than it
had, except at the end of what it only appends to or reads.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from torpor.engine.files import KINDS, Mount, OpenFile, mount_of
from torpor.engine.files_kept import build_id, digest_of
from torpor.engine.plain_paths import open_plain


class Fate(StrEnum):
    """With what a session goes on."""

    AS_IS = "the file as it is: the same"
    GROWN = "the file as it is: it has grown"
    OLD = "the old content, which only this session sees"
    COPY = "a visible copy of the old content, beside the changed file"
    AGAIN = "the file, made again with its old content"
    REFUSED = "nothing: the session cannot come back"


class Seen(msgspec.Struct, frozen=True):
    """What is at a file's path now. `link`: a symbolic link leads away from it. `folder`: its folder is there.

    `same`: the content is the recorded one; `begins`: it begins with the recorded one.
    """

    kind: str = ""
    dev: int = 0
    ino: int = 0
    size: int = 0
    mode: int = 0
    folder: bool = True
    link: bool = False
    same: bool = False
    begins: bool = False


class Judged(msgspec.Struct, frozen=True):
    """A file with its fate. `reason` is a sentence for a refusal; `told` one for the owner, may be empty."""

    file: OpenFile
    seen: Seen
    fate: Fate
    reason: str = ""
    told: str = ""


def look(file: OpenFile) -> Seen:
    """What is there now. Reads the file only when its facts alone do not tell."""
    try:
        opened = open_plain(file.path, os.O_PATH)
    except OSError as error:
        return Seen(link=error.errno == errno.ELOOP, folder=_has_folder(file.path))
    try:
        facts = os.fstat(opened)
        kind = KINDS.get(stat.S_IFMT(facts.st_mode), "special file")
        same = kind == file.kind and (kind != "file" or _unchanged(file, facts))
        begins = same
        if kind == "file" == file.kind and not same and facts.st_size >= file.size:
            same, begins = _compare(file, opened, facts.st_size)
        return Seen(
            kind=kind,
            dev=facts.st_dev,
            ino=facts.st_ino,
            size=facts.st_size,
            mode=facts.st_mode,
            same=same,
            begins=begins,
        )
    finally:
        os.close(opened)


def judge(file: OpenFile, seen: Seen, *, has_copy: bool) -> Judged:
    """The fate of one file. `has_copy`: its old content can be had."""
    if seen.same:
        return Judged(file, seen, Fate.AS_IS)
    if file.kind != "file":
        gone = "is gone" if not seen.kind else f"is a {seen.kind} now"
        return _refused(file, seen, f"The {file.kind} {file.name}, which the session works in or has open, {gone}.")
    changes = file.use.appends or file.use.writes
    if seen.kind == "file" and not file.use.writes and not file.use.mapped:
        follows = (seen.dev, seen.ino) == (file.dev, file.ino)
        if seen.begins and (follows or file.use.appends):
            return Judged(file, seen, Fate.GROWN)
        if file.use.appends and not file.use.reads and not has_copy:
            told = f"{_what_happened(file, seen)}; what the session appends goes to the end of it."
            return Judged(file, seen, Fate.GROWN, told="" if follows and seen.size >= file.size else told)
    if not has_copy:
        return _refused(file, seen, f"{_what_happened(file, seen)}, and there is no copy of what it was.")
    if not seen.folder and (changes or seen.link):
        return _refused(file, seen, f"{file.name} cannot be made again: its folder is gone or led away from.")
    if not changes:
        return Judged(file, seen, Fate.OLD)
    if not seen.kind and not seen.link:
        return Judged(file, seen, Fate.AGAIN, told=f"{file.name} had been deleted; it has its old content again.")
    return Judged(file, seen, Fate.COPY)


def missing_mounts(files: Iterable[OpenFile], then: list[Mount], now: list[Mount]) -> list[str]:
    """A sentence for each mount that holds one of the files and is not there any more."""
    here = {mount.path: mount.kind for mount in now}
    needed = {mount_of(os.fsdecode(file.path), then): file for file in reversed(list(files))}
    return [
        f"The mount {mount.path} ({mount.kind}) is missing; the session uses {file.name} on it."
        for mount, file in sorted(needed.items(), key=lambda pair: pair[0].path)
        if here.get(mount.path) != mount.kind
    ]


def summary(judged: Iterable[Judged]) -> list[str]:
    """What the owner is told about files that changed while the session was away."""
    old: dict[str, list[Judged]] = {}
    told = []
    for one in judged:
        if one.told:
            told.append(one.told)
        if one.fate is Fate.OLD:
            old.setdefault(one.file.package or one.file.name, []).append(one)
    for name, files in sorted(old.items()):
        if files[0].file.package:
            loaded = "the file of it that it had" if len(files) == 1 else f"the {len(files)} files of it that it had"
            told.append(f"{name} was upgraded, changed or removed meanwhile; the session goes on with {loaded} loaded.")
        else:
            told.append(f"{_what_happened(files[0].file, files[0].seen)}; the session goes on with its old content.")
    return told


def _refused(file: OpenFile, seen: Seen, reason: str) -> Judged:
    return Judged(file, seen, Fate.REFUSED, reason=reason)


def _what_happened(file: OpenFile, seen: Seen) -> str:
    if file.package:
        return f"{file.package} was upgraded or changed: {file.name} is {'not what it was' if seen.kind else 'gone'}"
    if not seen.kind:
        return f"{file.name} was {'replaced by a symbolic link' if seen.link else 'deleted'}"
    return f"{file.name} was {'replaced' if (seen.dev, seen.ino) != (file.dev, file.ino) else 'changed'}"


def _unchanged(file: OpenFile, facts: os.stat_result) -> bool:
    same = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    if same != (file.dev, file.ino, file.size, file.mtime_ns):
        return False
    return facts.st_ctime_ns == file.ctime_ns or not file.digest


def _compare(file: OpenFile, path_only: int, size: int) -> tuple[bool, bool]:
    """Whether the content is the recorded one, and whether it begins with it; False where that cannot be known."""
    opened = os.open(f"/proc/self/fd/{path_only}", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if file.digest:
            begins = digest_of(opened, file.size) == file.digest
            return begins and size == file.size, begins
        same = size == file.size and bool(file.build_id) and build_id(opened) == file.build_id
        return same, same
    finally:
        os.close(opened)


def _has_folder(path: bytes) -> bool:
    try:
        os.close(open_plain(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY))
    except OSError:
        return False
    return True
