"""In which order the memory that nobody has touched yet is brought, and in which portions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torpor.engine.lazy_plan import Piece
from torpor.engine.page_family import Family
from torpor.engine.page_trace import Place
from torpor.engine.userfault import PAGE

PORTION = 4 << 20  # bytes that are read at once in the background
LARGEST_RUN = 1 << 20  # bytes that are put in place at once: news of the kernel waits meanwhile
AHEAD = 4 << 20  # bytes after a touched place that come before everything else
TOUCHES = 64  # of which what follows is brought first


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


class Order:
    """Everything that is waited for: first what follows the last touches, then what was touched first the last time,
    then the rest in the order of addresses. Several threads may take portions."""

    def __init__(self, families: Sequence[Family], earlier: Sequence[Place]) -> None:
        rank = {place: number for number, place in enumerate(earlier)}
        self._lock = threading.Lock()
        self._ahead: list[list[tuple[Family, Piece]]] = []
        waiting = [(family, piece) for family in families for piece in family.task.pieces if family.waits(piece)]
        waiting.sort(key=lambda one: rank.get((one[0].task.image_id, one[1].address), len(rank)))
        self._rest = waiting[::-1]

    def touched(self, family: Family, piece: Piece) -> None:
        """What follows a touched piece is likely to be touched next."""
        following = [(family, one) for one in family.following(piece, AHEAD)]
        with self._lock:
            self._ahead = [*self._ahead[-TOUCHES:], following[::-1]]

    def portion(self) -> list[Run]:
        """What to bring next, at most PORTION bytes; nothing when all is brought, or is being brought."""
        runs: list[Run] = []
        size = 0
        with self._lock:
            for source in chain(self._ahead[::-1], [self._rest]):
                while source and size + source[-1][1].size <= PORTION:
                    family, piece = source.pop()
                    if family.waits(piece):
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
