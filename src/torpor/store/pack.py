"""The pack format, version 1: many chunks in one file, each readable on its own with direct I/O.

    page 0        header: magic, format, key id
    page 1 ...    chunks, each at the start of a page, the rest of its last page zero
    index         (id, length) of every chunk in order; offsets follow from the lengths
    last bytes    footer: magic, format, number of chunks, where the index starts, MAC

The MAC (keyed BLAKE3) covers header, index and footer. Chunks need none: their ids are keyed hashes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from hmac import compare_digest
from pathlib import Path
from typing import NamedTuple

from torpor.errors import IntegrityError, NewerFormat
from torpor.store import direct
from torpor.store.direct import PAGE, padded
from torpor.store.keys import MAC_BYTES, Keys, mac
from torpor.store.layout import Layout

FORMAT = 1
SIZE = 32 << 20
"""Most bytes of header and chunks in one pack."""
MAX_CHUNK = 1 << 20

_HEADER = struct.Struct("<8sI16s")
_ENTRY = struct.Struct("<32sI")
_FOOTER = struct.Struct("<8sIIQ")
_BEGINS = b"TORPORPK"
_ENDS = b"TORPORPE"


class Entry(NamedTuple):
    """One chunk in a pack: its id, where it starts and how many bytes it has."""

    id: bytes
    offset: int
    length: int


class Contents(NamedTuple):
    """What a pack holds, in the order of the file, and the MAC that says so."""

    entries: list[Entry]
    mac: bytes


def header(keys: Keys) -> bytes:
    """The first page of a pack."""
    return _HEADER.pack(_BEGINS, FORMAT, keys.key_id).ljust(PAGE, b"\0")


def tail(entries: list[Entry], end: int, keys: Keys) -> tuple[bytes, bytes]:
    """Index and footer (whole pages) of a pack whose chunks end at `end`, and the MAC in them."""
    index = b"".join(_ENTRY.pack(entry.id, entry.length) for entry in entries)
    footer = _FOOTER.pack(_ENDS, FORMAT, len(entries), end)
    signature = mac(keys.pack, header(keys), index, footer)
    gap = bytes(padded(len(index) + _FOOTER.size + MAC_BYTES) - len(index) - _FOOTER.size - MAC_BYTES)
    return index + gap + footer + signature, signature


def open_readable(layout: Layout, name: str) -> int:
    """A descriptor of the pack, published or still private; close it. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | layout.direct_flag
    try:
        fd = os.open(layout.packs / name, flags)
    except FileNotFoundError:
        try:
            fd = os.open(layout.incoming / name, flags)
        except FileNotFoundError:
            fd = os.open(layout.packs / name, flags)  # published between the two looks
    if not layout.direct:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the disk is asked, not the page cache
    return fd


def read_contents(fd: int, name: str | Path, keys: Keys) -> Contents:
    """The authenticated index of an open pack. Raises IntegrityError, NewerFormat, OSError."""
    size = os.fstat(fd).st_size
    if size < 2 * PAGE or size % PAGE:
        raise IntegrityError(f"The pack {name} is cut short.")
    first = direct.new_buffer(PAGE)
    direct.read_fully(fd, first, 0)
    _check_header(bytes(first[: _HEADER.size]), name, keys)

    last = direct.new_buffer(PAGE)
    direct.read_fully(fd, last, size - PAGE)
    footer = bytes(last[-_FOOTER.size - MAC_BYTES : -MAC_BYTES])
    signature = bytes(last[-MAC_BYTES:])
    magic, _, count, end = _FOOTER.unpack(footer)
    tail_size = padded(count * _ENTRY.size + _FOOTER.size + MAC_BYTES)
    if magic != _ENDS or end % PAGE or end + tail_size != size:
        raise IntegrityError(f"The index of the pack {name} is damaged.")
    whole = direct.new_buffer(tail_size)
    direct.read_fully(fd, whole, end)
    index = whole[: count * _ENTRY.size]
    if not compare_digest(signature, mac(keys.pack, first, index, footer)):
        raise IntegrityError(f"The index of the pack {name} is damaged.")
    return Contents(list(_entries(index)), signature)


def windows(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    """Neighbouring entries together, at most `size` bytes (padded) at a time; `entries` sorted by offset."""
    window: list[Entry] = []
    for entry in entries:
        if window and (
            entry.offset != window[-1].offset + padded(window[-1].length)
            or entry.offset + padded(entry.length) - window[0].offset > size
        ):
            yield window
            window = []
        window.append(entry)
    if window:
        yield window


def _entries(index: memoryview) -> Iterator[Entry]:
    offset = PAGE
    for chunk_id, length in _ENTRY.iter_unpack(index):
        yield Entry(chunk_id, offset, length)
        offset += padded(length)


def _check_header(data: bytes, name: str | Path, keys: Keys) -> None:
    magic, version, key_id = _HEADER.unpack(data)
    if magic != _BEGINS:
        raise IntegrityError(f"The file {name} is not a pack, or its header is damaged.")
    if version > FORMAT:
        raise NewerFormat(
            f"The pack {name} has format {version}; this Torpor knows formats up to {FORMAT}.",
            safe="It was left as it is.",
            hint="Install the newer Torpor that wrote it.",
        )
    if key_id != keys.key_id:
        raise IntegrityError(f"The pack {name} belongs to another site's key ({key_id.hex()}).")
