"""Which memory a session touched first after it came back: the order for the next time."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

LIMIT = 16384  # entries kept: 4 GiB of large chunks

_PLACE = struct.Struct("<IQ")  # task, address

Place = tuple[int, int]


class Trace:
    """The places touched so far, in order; those of earlier times come after. Several threads may add."""

    def __init__(self, path: Path) -> None:
        """`path` may not exist yet; its folder is not the session's owner's to write."""
        self._path = path
        self._lock = threading.Lock()
        self._touched: dict[Place, None] = {}
        self.earlier = _load(path)

    def touched(self, task: int, address: int) -> None:
        """Notes a place; again is harmless."""
        with self._lock:
            self._touched.setdefault((task, address))

    def store(self) -> None:
        """Keeps it for the next time. Raises OSError."""
        with self._lock:
            places = list(dict.fromkeys([*self._touched, *self.earlier]))[:LIMIT]
        draft = self._path.with_name(self._path.name + ".new")
        with open(draft, "wb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as file:
            file.write(b"".join(_PLACE.pack(*place) for place in places))
        draft.rename(self._path)


def _load(path: Path) -> list[Place]:
    """An order that cannot be read is none: everything arrives all the same."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = len(data) - len(data) % _PLACE.size
    return [(task, address) for task, address in _PLACE.iter_unpack(data[:whole])]
