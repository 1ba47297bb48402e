"""How far the relay has read in what its kernel says, in a file that outlives a relay that is killed.

The inner half keeps what is not settled; a next relay goes on after the last message that clients have got.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from torpor.jupyter.inner import CHANNELS
from torpor.jupyter.line import STREAM

_FORMAT = 1
_MARK = struct.Struct(f"<B{STREAM}s?Q{len(CHANNELS)}QQQI")
_HEAD = struct.Struct("<BB")  # which of the two marks that follow holds (it is not changed while it does); see `begin`


class Mark(NamedTuple):
    """A place in a stream. It can be gone on from where `is_whole`."""

    stream: bytes
    is_whole: bool  # no message is half behind the settled frames
    settled: int  # frames that need not come again
    read: tuple[int, ...]  # bytes behind them that need not come again either, for each channel
    large: tuple[int, int]  # numbers of the frames that a message in several frames to the kernel begins and ends with
    subscribers: int  # clients that listen
    in_hand: bool = False  # the next message may have been passed on already


class Bookmark:
    """The file with the mark."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, _HEAD.size + 2 * _MARK.size)
        self._memory = mmap.mmap(self._descriptor, _HEAD.size + 2 * _MARK.size)
        self._current = self._memory[0] & 1

    def read(self) -> Mark | None:
        """The mark that was set last, by this relay or an earlier one; None when there is none to go on from."""
        current, in_hand = _HEAD.unpack_from(self._memory)
        version, stream, is_whole, settled, *read, first, end, subscribers = _MARK.unpack_from(
            self._memory, self._place(current & 1)
        )
        if version != _FORMAT or not is_whole:
            return None
        return Mark(stream, is_whole, settled, tuple(read), (first, end), subscribers, bool(in_hand))

    def begin(self) -> None:
        """The next message is about to be passed on; `set` tells that it was."""
        self._memory[1] = 1

    def set(self, mark: Mark) -> None:
        """Replaces the mark, whole or not at all."""
        self._current = 1 - self._current
        _MARK.pack_into(
            self._memory,
            self._place(self._current),
            _FORMAT,
            mark.stream,
            mark.is_whole,
            mark.settled,
            *mark.read,
            *mark.large,
            mark.subscribers,
        )
        self._memory[0] = self._current
        self._memory[1] = mark.in_hand

    def close(self) -> None:
        """Leaves the file as it is."""
        self._memory.close()
        os.close(self._descriptor)

    def _place(self, number: int) -> int:
        return _HEAD.size + number * _MARK.size
