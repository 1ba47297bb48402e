"""Reading packs back: every byte from the disk itself, every chunk hashed again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from torpor.errors import IntegrityError, NewerFormat
from torpor.store import direct, pack
from torpor.store.direct import padded
from torpor.store.index import Index
from torpor.store.keys import Keys
from torpor.store.layout import Layout

WINDOW_BYTES = 4 << 20

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done and how much there is in total."""

_scratch = threading.local()


def scratch() -> memoryview:
    """This thread's own page-aligned buffer of WINDOW_BYTES, kept because touching fresh memory is slow."""
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = direct.new_buffer(WINDOW_BYTES)
    buffer: memoryview = _scratch.buffer
    return buffer


class Audit:
    """Checks packs in background threads."""

    def __init__(self, layout: Layout, keys: Keys, index: Index, pause: Callable[[], None], threads: int) -> None:
        """`pause` is called before each read; it returns when reading is welcome."""
        self._layout, self._keys, self._index, self._pause = layout, keys, index, pause
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="torpor-audit")
        self._checks: dict[str, Future[set[bytes]]] = {}

    def expect(self, name: str, mac: bytes) -> None:
        """Check that a pack just written holds what its index says, and that this index has this MAC."""
        self._checks[name] = self._pool.submit(self._check, name, mac)

    def settle(self) -> Iterator[None]:
        """Wait for every check, one after another. Raises IntegrityError when a pack is not what was written."""
        for name, check in self._checks.items():
            if count := len(self._damaged_in(name, check.result)):
                raise IntegrityError(
                    f"{count} chunks of the checkpoint are not on the disk as they were written.",
                    safe="The session was not touched.",
                    hint="Look for errors of the store's disk, then save it again: these chunks are stored anew.",
                )
            yield

    def recheck(self, name: str, used: set[bytes]) -> None:
        """Check an older pack of which `used` are referred to. Raises IntegrityError when one of these is damaged."""
        if count := len(self._damaged_in(name, lambda: self._check(name, None)) & used):
            raise IntegrityError(
                f"{count} chunks that an earlier checkpoint stored in the pack {name} are damaged.",
                safe="The session was not touched.",
                hint="Save it again: these chunks are then stored anew.",
            )
        self._index.verified([name])

    def close(self) -> None:
        """Drop the checks that have not begun and wait for those that have."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _damaged_in(self, name: str, check: Callable[[], set[bytes]]) -> set[bytes]:
        try:
            damaged = check()
        except (IntegrityError, NewerFormat, OSError) as error:
            self._index.distrust(name)
            raise IntegrityError(
                f"The pack {name} cannot be read back: {error}",
                safe="The session was not touched.",
                hint="Look for errors of the store's disk, then save it again: its chunks are stored anew.",
            ) from error
        self._index.suspect(name, damaged)
        return damaged

    def _check(self, name: str, mac: bytes | None) -> set[bytes]:
        fd = pack.open_readable(self._layout, name)
        try:
            contents = pack.read_contents(fd, name, self._keys)
            if mac is not None and contents.mac != mac:
                raise IntegrityError(f"The pack {name} is not the one that was written.")
            damaged = set[bytes]()
            for window in pack.windows(contents.entries, WINDOW_BYTES):
                self._pause()
                damaged.update(self._damaged(fd, window))
        finally:
            os.close(fd)
        return damaged

    def _damaged(self, fd: int, window: list[pack.Entry]) -> list[bytes]:
        begin = window[0].offset
        data = scratch()[: window[-1].offset + padded(window[-1].length) - begin]
        direct.read_fully(fd, data, begin)
        return [
            entry.id
            for entry in window
            if self._keys.chunk_id(data[entry.offset - begin : entry.offset - begin + entry.length]) != entry.id
        ]
