"""In which order the memory that nobody has touched yet is brought, and in which portions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torpor.engine.lazy_plan import Piece
from torpor.engine.page_family import Family, Waiting
from torpor.engine.page_trace import Place
from torpor.engine.pagestream import SMALL_BLOCK
from torpor.engine.userfault import PAGE

PORTION = 1 << 20  # bytes that are read at once in the background
LARGEST_RUN = 1 << 20  # bytes that are put in place at once: news of the kernel waits meanwhile
AHEAD = 4 << 20  # bytes after a touched place that come before everything else
TOUCHES = 64  # of which what follows is brought first


Touch = tuple[Family, Waiting, int]  # the address of the touched page


@dataclass(frozen=True)
class Run:
    """Pieces of one family that are neighbours: `whole` is all of them as if they were one."""

    family: Family
    pieces: list[Piece]

    @property
    def whole(self) -> Piece:
        """A piece without an id."""
        return Piece(b"", self.pieces[0].first, self.pieces[-1].last, self.pieces[0].address)

    def takes(self, family: Family, piece: Piece) -> bool:
        """Whether a piece may be added to its end."""
        return (
            family is self.family
            and piece.first == self.pieces[-1].last
            and (piece.last - self.pieces[0].first) * PAGE <= LARGEST_RUN
        )


class Underway:
    """Which pieces somebody brings just now, so that nobody brings them a second time, and who waits for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._brought: dict[tuple[int, int], list[Touch]] = {}

    def __bool__(self) -> bool:
        return bool(self._brought)

    def claim(self, family: Family, piece: Piece, touch: Touch | None = None) -> bool:
        """Whether the caller is to bring it; if not, the touch is answered by whoever does."""
        key = (family.task.image_id, piece.first)
        with self._lock:
            others = self._brought.get(key)
            waiting = [touch] if touch is not None else []
            if others is None:
                self._brought[key] = waiting
                return True
            others += waiting
            return False

    def done(self, family: Family, piece: Piece) -> list[Touch]:
        """Called when it is in place; the touches that waited for it."""
        with self._lock:
            return self._brought.pop((family.task.image_id, piece.first))


class Order:
    """Everything that is waited for: first what follows the last touches, then what was touched first the last time,
    then small mappings, then the rest, each in the order of addresses. Several threads may take portions."""

    def __init__(self, families: Sequence[Family], earlier: Sequence[Place], underway: Underway) -> None:
        rank = {place: number for number, place in enumerate(earlier)}
        self._lock = threading.Lock()
        self._underway = underway
        self._ahead: list[list[tuple[Family, Piece]]] = []
        waiting = [(family, piece) for family in families for piece in family.task.pieces if family.waits(piece)]
        waiting.sort(
            key=lambda one: (rank.get((one[0].task.image_id, one[1].address), len(rank)), one[1].size > SMALL_BLOCK)
        )
        self._rest = waiting[::-1]

    def touched(self, family: Family, piece: Piece) -> None:
        """What follows a touched piece is likely to be touched next."""
        following = [(family, one) for one in family.following(piece, AHEAD)]
        with self._lock:
            self._ahead = [*self._ahead[-TOUCHES:], following[::-1]]

    def portion(self) -> list[Run]:
        """What the caller is to bring next, at most PORTION bytes; nothing when all is brought, or underway."""
        runs: list[Run] = []
        size = 0
        with self._lock:
            for source in chain(self._ahead[::-1], [self._rest]):
                while source and size + source[-1][1].size <= PORTION:
                    family, piece = source.pop()
                    if family.waits(piece) and self._underway.claim(family, piece):
                        _add(runs, family, piece)
                        size += piece.size
                if source:
                    break
            self._ahead = [left for left in self._ahead if left]
        return runs


def _add(runs: list[Run], family: Family, piece: Piece) -> None:
    if runs and runs[-1].takes(family, piece):
        runs[-1].pieces.append(piece)
    else:
        runs.append(Run(family, [piece]))
