"""The threads that put memory in place: what is touched at once, everything else in the background."""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from torpor.engine import page_log, userfault
from torpor.engine.lazy_plan import Piece
from torpor.engine.page_chunks import Chunks
from torpor.engine.page_family import Family, Gate, Waiting
from torpor.engine.page_log import PageLog
from torpor.engine.page_order import PORTION, Order, Run, Touch, Underway
from torpor.engine.page_trace import Trace
from torpor.engine.userfault import PAGE

FAULT_THREADS = 2
FILL_THREADS = 3  # one waits for the disk while two cores hash
PAUSE = 0.001  # seconds until something that the kernel put off is tried again
HOLD = "TORPOR_HOLD_FILL"  # for tests: nothing is brought in the background while this file exists


class Bringer:
    """One server's threads. `families` may get members meanwhile, inside the gate."""

    def __init__(
        self,
        families: Sequence[Family],
        gate: Gate,
        chunks: Chunks,
        log: PageLog,
        trace: Trace,
        news: int,
        stopping: threading.Event,
        progress: Callable[[int], None],
    ) -> None:
        """`news` is an eventfd that is written when there may be nothing left to do; `progress` gets bytes."""
        self._families, self._gate, self._chunks, self._log, self._trace = families, gate, chunks, log, trace
        self._news, self._stopping, self._progress = news, stopping, progress
        self._touches: queue.SimpleQueue[Touch | None] = queue.SimpleQueue()
        self._underway = Underway()
        self._order: Order | None = None
        self._fillers = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def idle(self) -> bool:
        """Whether nobody brings anything now."""
        return not self._fillers and not self._underway

    def start(self) -> None:
        """Answers touches from now on."""
        self._start_threads(self._answer_touches, FAULT_THREADS)

    def fill(self) -> None:
        """Brings everything that is waited for now."""
        self._order = order = Order(self._families, self._trace.earlier, self._underway)
        self._fillers = FILL_THREADS
        self._start_threads(lambda: self._fill(order), FILL_THREADS)

    def touched(self, touch: Touch) -> None:
        """Answers a touch as soon as possible."""
        self._touches.put(touch)

    def stop(self) -> None:
        """Ends all threads at a clean point, once `stopping` is set."""
        for _ in range(FAULT_THREADS):
            self._touches.put(None)
        for thread in self._threads:
            thread.join()

    def _start_threads(self, target: Callable[[], None], count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=target, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer_touches(self) -> None:
        buffer = memoryview(mmap.mmap(-1, PORTION))
        while (touch := self._touches.get()) is not None:
            piece = self._wanted(*touch)
            if piece is not None:
                self._answer(touch, piece, buffer)

    def _wanted(self, family: Family, one: Waiting, address: int) -> Piece | None:
        """The piece that a touch needs; None when it has been answered."""
        while not self._stopping.is_set():
            with self._gate.deliver():
                if one.gone:
                    return None
                page = one.pages.page_at(address)
                if page is not None:
                    return family.piece_of(page)
                if one.give_zeros(address):
                    return None
            time.sleep(PAUSE)
        return None

    def _answer(self, touch: Touch, piece: Piece, buffer: memoryview) -> None:
        family = touch[0]
        self._trace.touched(family.task.image_id, piece.address)
        if self._order is not None:
            self._order.touched(family, piece)
        if not self._underway.claim(family, piece, touch):
            return  # whoever brings it wakes this thread, too
        if not family.waits(piece):
            self._wake(family, piece)
        elif self._chunks.fetch([piece.chunk], buffer[: piece.size], [piece.size]):
            self._bring(Run(family, [piece]), userfault.address_of(buffer))
        if not self._fillers:
            os.eventfd_write(self._news, 1)

    def _fill(self, order: Order) -> None:
        """Brings portions until nothing is waited for; several threads take turns."""
        buffer = memoryview(mmap.mmap(-1, PORTION))
        hold = os.environ.get(HOLD)
        while not self._stopping.is_set():
            while hold and os.path.exists(hold) and not self._stopping.is_set():
                time.sleep(PAUSE)
            runs = order.portion()
            if not runs:
                break
            pieces = [piece for run in runs for piece in run.pieces]
            sizes = [piece.size for piece in pieces]
            if not self._chunks.fetch([piece.chunk for piece in pieces], buffer[: sum(sizes)], sizes):
                return
            source = userfault.address_of(buffer)
            for run in runs:
                self._bring(run, source)
                source += run.whole.size
            self._progress(sum(sizes))
        with self._lock:
            self._fillers -= 1
        os.eventfd_write(self._news, 1)

    def _bring(self, run: Run, source: int) -> None:
        """Puts pieces, which lie at our address `source`, in place."""
        while not self._deliver(run.family, run.whole, source):
            if self._stopping.wait(PAUSE):
                return
        for piece in run.pieces:
            self._wake(run.family, piece)

    def _deliver(self, family: Family, piece: Piece, source: int) -> bool:
        with self._gate.deliver():
            if not family.deliver(piece, source, all_registered=self._chunks.init is not None):
                return False
            if self._chunks.init is not None:
                self._log.add(0, page_log.ARRIVED, self._families.index(family), piece.first, piece.last)
        return True

    def _wake(self, family: Family, piece: Piece) -> None:
        """Lets all that touched a piece look again."""
        touches = self._underway.done(family, piece)
        if touches:
            with self._gate.deliver():
                for _, one, address in touches:
                    if not one.gone:
                        userfault.wake(one.uffd, address, PAGE)
