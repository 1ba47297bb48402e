"""CRIU's image files: the few we write ourselves, and all the small ones as one stream of chunks.

With `--page-server` a dump writes neither pagemap nor pages; on the way back we write both. The layouts are
those of CRIU's `images/pagemap.proto` (MIT) and `criu/include/magic.h`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

from torpor.engine.pagestream import PAGE, TYPE_TASK, Entry, PageObject
from torpor.engine.protobuf import entries_of, entry, fields_of, packed

IMG_COMMON_MAGIC = 0x54564319
PAGEMAP_MAGIC = 0x56084025
ENTRY = struct.Struct("<QQI")
NOT_STORED = (".log", ".py", ".sock", ".pid")
FILES = "files.img"
THREADS = "core-"  # how the name of a thread's image begins
IS_TIMER = b"\x08\x11"  # how an entry of FILES begins when its descriptor is a timer (fd_types.TIMERFD)
TIMER = 12  # its field in the entry; below are fields of the timer
EXPIRED, VALUE, INTERVAL = 5, (7, 8), (9, 10)  # times not read yet; seconds and nanoseconds
SHOWN = (8, 9), (10, 11)  # fields of mm_entry: where arguments begin and end, where the environment does
MAPPINGS, ADVICE = 14, 9  # the field of mm_entry with its mappings, and the field of these with bits of madvise(2)
WIPE_ON_FORK = 1 << 18
CLOCKS = "timens-0.img"
PROCESSES = "pstree.img"
PID, GROUP, SESSION, THREAD = 1, 3, 4, 5  # fields of an entry of PROCESSES


def small_images(folder: Path) -> Iterator[Path]:
    """The image files of a dump made with a page server, in a stable order."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".img":
            yield path


def pack_entries(entries: list[Entry]) -> bytes:
    """A pagemap as bytes for the manifest: 20 bytes an entry."""
    return b"".join(ENTRY.pack(one.vaddr, one.pages, one.flags) for one in entries)


def unpack_entries(entries: bytes) -> list[Entry]:
    """The reverse of `pack_entries`."""
    return [Entry(*fields) for fields in ENTRY.iter_unpack(entries)]


def write_pagemap(folder: Path, kind: int, image_id: int, pages_id: int, entries: list[Entry]) -> None:
    """Writes `pagemap-ID.img` (or `pagemap-shmem-ID.img`), whose pages are in `pages-PAGES_ID.img`."""
    name = f"pagemap-{image_id}.img" if kind == TYPE_TASK else f"pagemap-shmem-{image_id}.img"
    parts = [struct.pack("<II", IMG_COMMON_MAGIC, PAGEMAP_MAGIC), entry(packed([(1, pages_id)]))]
    parts += [
        entry(packed([(1, one.vaddr), (2, one.pages & 0xFFFFFFFF), (4, one.flags), (5, one.pages)])) for one in entries
    ]
    (folder / name).write_bytes(b"".join(parts))


def parse_object_name(name: str) -> PageObject:
    """An empty PageObject for a manifest's `pages/task/ID` or `pages/shmem/ID`. Raises ValueError otherwise."""
    first, kind, image_id = name.split("/")
    if first != "pages" or kind not in ("task", "shmem"):
        raise ValueError(f"{name} is not the name of memory")
    return PageObject(TYPE_TASK if kind == "task" else TYPE_TASK + 1, int(image_id))


def process_ids(processes: bytes) -> set[int]:
    """Every number that PROCESSES gives to a process, a thread, a job or a session."""
    numbers = {PID, GROUP, SESSION, THREAD}
    found = (field for body in entries_of(processes) for field in fields_of(body))
    return {int(value) for number, value in found if number in numbers and isinstance(value, int)} - {0}


def clocks(image: bytes) -> list[tuple[int, int, int]]:
    """What the clocks of CLOCKS showed: the clock's number, seconds, nanoseconds. Nothing when the kernel told none."""
    found = []
    for body in entries_of(image):
        numbers = {1: time.CLOCK_MONOTONIC, 2: time.CLOCK_BOOTTIME}
        for number, value in fields_of(body):
            assert isinstance(value, bytes)
            moment = dict(fields_of(value))
            found.append((numbers[number], int(moment[1]), int(moment[2])))
    return found


def root_pid(processes: bytes) -> int:
    """The number of the tree's first process."""
    return int(dict(fields_of(next(entries_of(processes))))[PID])


def with_own_session(processes: bytes) -> bytes:
    """PROCESSES of a tree whose root belonged to the job or session of a shell outside: it gets its own.

    The root comes first. What shared the job or session of the root goes with it.
    """
    entries = [list(fields_of(body)) for body in entries_of(processes)]
    root = dict(entries[0])
    inside = {dict(fields)[PID] for fields in entries}
    replaced = {number: {root[number]: root[PID]} if root[number] not in inside else {} for number in (GROUP, SESSION)}
    parts = [processes[:8]]
    for fields in entries:
        kept = ((number, replaced.get(number, {}).get(value, value)) for number, value in fields)
        parts.append(entry(packed(kept)))
    return b"".join(parts)


def rearm_timers(files: bytes) -> bytes:
    """FILES with every periodic timer descriptor going on that had expired, and was not read, when it was saved.

    Such a timer starts its next period when it is read, and until then the kernel shows no time left; CRIU takes that
    for a timer which is not set, and after the read of what had expired it would never expire again.
    """
    parts = [files[:8]]
    for body in entries_of(files):
        if body.startswith(IS_TIMER):
            body = packed(
                (number, _rearmed(value) if number == TIMER and isinstance(value, bytes) else value)
                for number, value in fields_of(body)
            )
        parts.append(entry(body))
    return b"".join(parts)


def never_late(mm_image: bytes) -> list[tuple[int, int]]:
    """Addresses (start, end) of a task, from its `mm-ID.img`, whose pages must be there before it runs.

    These are its arguments and its environment, which the kernel shows in /proc without waiting for them, and mappings
    that a child of a fork finds empty.
    """
    (memory,) = entries_of(mm_image)
    numbers = {number: value for number, value in fields_of(memory) if isinstance(value, int)}
    found = [(numbers[start] & -PAGE, numbers[end] + PAGE - 1 & -PAGE) for start, end in SHOWN]
    for number, mapping in fields_of(memory):
        if number == MAPPINGS and isinstance(mapping, bytes):
            known = dict(fields_of(mapping))
            start, end, advice = known[1], known[2], known.get(ADVICE, 0)
            assert isinstance(start, int)
            assert isinstance(end, int)
            assert isinstance(advice, int)
            if advice & WIPE_ON_FORK:
                found.append((start, end))
    return found


def frozen_seconds(folder: Path) -> float:
    """How long the tree was frozen, from CRIU's `stats-dump`. Raises FileNotFoundError."""
    data = (folder / "stats-dump").read_bytes()
    (size,) = struct.unpack_from("<I", data, 8)
    for number, value in fields_of(data[12 : 12 + size]):
        if number == 1 and isinstance(value, bytes):
            return sum(inner for field, inner in fields_of(value) if field == 2 and isinstance(inner, int)) / 1e6
    return 0.0


def _rearmed(timer: bytes) -> bytes:
    fields = list(fields_of(timer))
    values = dict(fields)
    waits = values.get(EXPIRED) != 0 and not any(values.get(number) for number in VALUE)
    source = dict(zip(VALUE, INTERVAL, strict=True)) if waits else {}
    return packed((number, values[source.get(number, number)]) for number, _ in fields)
