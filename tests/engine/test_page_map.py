"""Where saved pages belong while a process moves, drops and inherits them, against a plain model page by page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torpor.engine.lazy_plan import FLAG_LAZY, eager_pieces, lazy_tasks
from torpor.engine.page_map import DELIVERED, DROPPED, PAGE, WAITING, Extent, PageMap
from torpor.engine.pagestream import FLAG_PRESENT, TYPE_TASK, Entry, PageObject

ROOM = 48  # pages of address space
LATE = FLAG_PRESENT | FLAG_LAZY

places = st.integers(0, ROOM - 1)
sizes = st.integers(1, 12)
actions = st.one_of(
    st.tuples(st.sampled_from(["removed", "unmapped", "delivered"]), places, sizes),
    st.tuples(st.just("remapped"), places, sizes, places),
)


class Model:
    """Page by page: which saved page is where, and its state."""

    def __init__(self) -> None:
        self.at = {address: address - 8 for address in range(8, 24)} | {
            address: address - 14 for address in range(30, 40)
        }
        self.state = dict.fromkeys(range(26), WAITING)

    def removed(self, start: int, size: int) -> None:
        for address in range(start, start + size):
            if address in self.at:
                self.state[self.at[address]] = DROPPED

    def unmapped(self, start: int, size: int) -> None:
        self.removed(start, size)
        for address in range(start, start + size):
            self.at.pop(address, None)

    def remapped(self, start: int, size: int, target: int) -> None:
        moved = {
            address - start + target: self.at.pop(address)
            for address in range(start, start + size)
            if address in self.at
        }
        self.unmapped(target, size)
        self.at |= moved

    def delivered(self, start: int, size: int) -> None:
        for address in range(start, start + size):
            if self.state.get(self.at.get(address, -1)) == WAITING:
                self.state[self.at[address]] = DELIVERED


@given(st.lists(actions, max_size=20))
def test_the_map_is_right_page_by_page(actions: list[tuple[str, ...]]) -> None:
    model = Model()
    real = PageMap([Extent(8 * PAGE, 24 * PAGE, 0), Extent(30 * PAGE, 40 * PAGE, 16)], bytearray(26))
    for name, start, size, *target in actions:
        assert isinstance(start, int)
        assert isinstance(size, int)
        if name == "remapped":
            (to,) = target
            assert isinstance(to, int)
            if to < start + size and start < to + size:
                continue  # the kernel refuses it
            if any(address in model.at for address in range(to, to + size)):
                model.unmapped(to, size)
                real.unmapped(to * PAGE, (to + size) * PAGE)  # the kernel tells of this first
            model.remapped(start, size, to)
            real.remapped(start * PAGE, to * PAGE, size * PAGE)
        elif name == "delivered":
            model.delivered(start, size)
            for address in range(start, start + size):
                page = real.page_at(address * PAGE)
                if page is not None:
                    real.arrived(page, page + 1)
        else:
            getattr(model, name)(start, size)
            getattr(real, name)(start * PAGE, (start + size) * PAGE)
    agrees(model, real)
    agrees(model, real.copied())


def agrees(model: Model, real: PageMap) -> None:
    for address in range(ROOM + 12):
        page = model.at.get(address)
        waits = page is not None and model.state[page] == WAITING
        assert real.page_at(address * PAGE) == (page if waits else None)
        assert real.was_delivered(address * PAGE) == (page is not None and model.state[page] == DELIVERED)
        empty = page is None or model.state[page] == DROPPED
        assert (real.nothing_until(address * PAGE, (address + 1) * PAGE) > address * PAGE) == empty
    waiting = {page for page, state in model.state.items() if state == WAITING}
    found = {
        extent.page + number: extent.start // PAGE + number
        for extent in real.waiting(0, 26)
        for number in range((extent.end - extent.start) // PAGE)
    }
    assert found == {page: address for address, page in model.at.items() if page in waiting}
    assert real.complete == (not waiting)


def test_news_of_an_unmapping_that_was_overtaken_by_a_move_to_its_place_drops_nothing() -> None:
    real = PageMap([Extent(0, 4 * PAGE, 0), Extent(8 * PAGE, 12 * PAGE, 4)], bytearray(8))
    real.remapped(0, 8 * PAGE, 4 * PAGE)
    real.unmapped(8 * PAGE, 12 * PAGE)
    assert real.page_at(9 * PAGE) == 1
    real.unmapped(8 * PAGE, 12 * PAGE)
    assert real.page_at(9 * PAGE) is None


def a_task(image_id: int, first_chunk: bytes, *entries: Entry) -> PageObject:
    found = PageObject(TYPE_TASK, image_id, list(entries))
    pages = sum(entry.pages for entry in entries if entry.flags & FLAG_PRESENT)
    found.ids = [first_chunk, *(bytes([image_id, number]) for number in range(pages // 2 - 1))]
    found.lengths = [2 * PAGE] * (pages // 2)
    return found


def test_what_processes_share_and_what_a_fork_must_not_hand_on_is_there_at_once() -> None:
    parent = a_task(1, b"same", Entry(0, 4, LATE), Entry(8 * PAGE, 4, LATE), Entry(16 * PAGE, 2, FLAG_PRESENT))
    child = a_task(2, b"same", Entry(0, 4, LATE))
    first, second = lazy_tasks([parent, child], {1: [(8 * PAGE, 9 * PAGE)]})
    assert [(extent.start // PAGE, extent.end // PAGE, extent.page) for extent in first.extents] == [
        (2, 4, 2),
        (9, 12, 5),
    ]
    assert [piece.first for piece in first.pieces] == [2, 4, 6]
    assert [(number, offset // PAGE) for number, offset in eager_pieces(parent)] == [(0, 0), (2, 4), (4, 8)]
    assert [(extent.start // PAGE, extent.page) for extent in second.extents] == [(2, 2)]
    assert sum(entry.pages for entry in parent.entries) == 10
