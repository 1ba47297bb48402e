"""What goes in comes out, and costs what it should."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.store import shelf
from tests.store.shelf import CHUNK, KEY, PAGE, noise, save

from torpor.errors import IntegrityError, NewerFormat, NotFound, StoreError, UsageError
from torpor.store import MAX_SEGMENT, Object, Store
from torpor.store.index import Index
from torpor.store.keys import derive
from torpor.store.layout import Layout
from torpor.store.stream import BUFFER_BYTES

SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK, 3 * CHUNK + 17, 1 << 20, (1 << 20) + 5]


@pytest.fixture(params=["direct", "buffered"])
def either(request: pytest.FixtureRequest, store: Store, folder: Path) -> Iterator[Store]:
    """A store on a file system that takes O_DIRECT, and the same where it would not."""
    if request.param == "direct":
        yield store
        return
    layout = Layout(folder, direct=False)
    keys = derive(KEY)
    with Store(layout, keys, Index(layout, keys)) as buffered:
        yield buffered


def test_every_size_comes_back(either: Store) -> None:
    contents = {f"object-{size}": noise(size, size) for size in SIZES}
    made = save(either, "s", "c", contents)
    assert shelf.load(either, "s", "c") == contents
    assert either.manifest("s", "c") == made
    either.verify(made)


@pytest.mark.parametrize("chunk", [PAGE, 3 * PAGE, 1 << 20])
def test_every_chunk_size_comes_back_over_several_packs(store: Store, folder: Path, chunk: int) -> None:
    contents = {f"object-{seed}": noise(MAX_SEGMENT, seed) for seed in range(4)}
    save(store, "s", "c", contents, chunk)
    assert len(shelf.packs(folder)) == 3
    assert shelf.load(store, "s", "c") == contents


def test_memory_that_is_not_aligned_is_filled_too(store: Store) -> None:
    data = noise(5 * CHUNK + 100)
    made = save(store, "s", "c", {"memory": data})
    for shift in (0, 1, 512, PAGE - 1):
        assert shelf.read(store, made.objects["memory"], shift=shift) == data


def test_chunks_come_back_in_any_order_and_repeated(store: Store) -> None:
    data = noise(8 * CHUNK)
    ids = save(store, "s", "c", {"memory": data}).objects["memory"].ids()
    order = [7, 0, 3, 3, 1, 7, 2, 5]
    out = bytearray(len(order) * CHUNK)
    store.read_into([ids[i] for i in order], memoryview(out), [CHUNK] * len(order))
    assert out == b"".join(data[i * CHUNK : (i + 1) * CHUNK] for i in order)


def test_zeros_are_not_stored(store: Store, folder: Path) -> None:
    zeros = bytes(16 * CHUNK + 3)
    with store.writer() as writer:
        thing = shelf.put(writer, zeros)
        writer.seal()
        assert (writer.stats.logical, writer.stats.stored, writer.stats.new) == (len(zeros), 0, 0)
        writer.commit(shelf.manifest(store, "s", "c", {"zeros": thing}))
        writer.verify()
    assert shelf.packs(folder) == []
    assert shelf.load(store, "s", "c") == {"zeros": zeros}


def test_nearly_zero_chunks_are_stored(store: Store) -> None:
    contents = {"inside": bytes(PAGE) + b"\1" + bytes(CHUNK), "end": bytes(CHUNK - 1) + b"\1"}
    save(store, "s", "c", contents)
    assert shelf.load(store, "s", "c") == contents


def test_what_is_stored_already_adds_no_byte(store: Store, folder: Path) -> None:
    data = noise(40 * CHUNK)
    save(store, "one", "c1", {"memory": data})
    before = {path: path.stat().st_size for path in shelf.packs(folder)}
    changed = data[:CHUNK] + noise(CHUNK, 9) + data[2 * CHUNK :] + data[:CHUNK]
    with store.writer() as writer:
        again = shelf.put(writer, data)
        assert (writer.stats.stored, writer.stats.new) == (len(data), 0)
        other = shelf.put(writer, changed)
        assert (writer.stats.logical, writer.stats.stored, writer.stats.new) == (
            len(data) + len(changed),
            len(data) + CHUNK,
            CHUNK,
        )
        writer.seal()
        writer.commit(shelf.manifest(store, "two", "c2", {"again": again, "changed": other}))
        writer.verify()
    grown = {path: path.stat().st_size for path in shelf.packs(folder)}
    assert before.items() <= grown.items()
    assert sum(grown.values()) - sum(before.values()) <= CHUNK + 3 * PAGE
    assert shelf.load(store, "two", "c2") == {"again": data, "changed": changed}


def test_many_threads_put_and_read(store: Store) -> None:
    shared = noise(4 * CHUNK, 99)
    pieces = [shared + noise(100 * CHUNK, seed) + shared for seed in range(16)]
    with store.writer(buffer=1 << 20) as writer, ThreadPoolExecutor(4) as threads:
        things = list(threads.map(lambda data: shelf.put(writer, data), pieces))
        writer.seal()
        assert writer.stats.new == len(shared) + sum(len(piece) - 2 * len(shared) for piece in pieces)
        writer.commit(shelf.manifest(store, "s", "c", {str(i): thing for i, thing in enumerate(things)}))
        writer.verify()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda thing: shelf.read(store, thing), things)) == pieces


def test_the_memory_of_a_segment_is_free_after_put(store: Store) -> None:
    segment = bytearray(noise(8 * CHUNK))
    expected = bytes(segment)
    with store.writer() as writer:
        ids = writer.put(memoryview(segment), shelf.cut(expected))
        segment[:] = b"x" * len(segment)
        writer.seal()
        thing = Object(len(expected), b"".join(ids), [CHUNK] * 8)
        writer.commit(shelf.manifest(store, "s", "c", {"memory": thing}))
    assert shelf.read(store, thing) == expected


@pytest.mark.parametrize("verify_first", [True, False])
def test_verify_before_or_after_the_commit(store: Store, verify_first: bool) -> None:
    seen: list[tuple[int, int]] = []
    with store.writer() as writer:
        made = shelf.manifest(store, "s", "c", {"memory": shelf.put(writer, noise(CHUNK))})
        writer.seal()
        if verify_first:
            writer.verify(lambda done, total: seen.append((done, total)))
        writer.commit(made)
        if not verify_first:
            writer.verify(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]
    assert shelf.load(store, "s", "c") == {"memory": noise(CHUNK)}
    with store.writer() as again:
        shelf.put(again, noise(CHUNK))
        again.seal()
        again.verify(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]  # the pack was verified before: nothing is read a second time


def test_another_process_life_sees_everything(folder: Path) -> None:
    with Store.open(folder, KEY, create=True) as first:
        save(first, "s", "c", {"memory": noise(CHUNK)})
    with Store.open(folder, KEY) as second:
        assert second.manifests() == [("s", "c")]
        assert shelf.load(second, "s", "c") == {"memory": noise(CHUNK)}


def test_everything_is_the_owners_only(store: Store, folder: Path) -> None:
    save(store, "s", "c", {"memory": noise(CHUNK)})
    for path in [folder, *folder.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_an_aborted_writer_leaves_nothing(store: Store, folder: Path) -> None:
    with store.writer() as writer:
        shelf.put(writer, noise(200 * CHUNK))
        writer.seal()
    assert shelf.packs(folder) == shelf.incoming(folder) == []
    assert store.manifests() == []
    with pytest.raises(StoreError, match="takes no more"):
        writer.put(memoryview(b"x"), [1])
    with pytest.raises(StoreError, match="not sealed"):
        writer.commit(shelf.manifest(store, "s", "c", {}))


def test_an_error_in_the_block_aborts(store: Store, folder: Path) -> None:
    def fail() -> None:
        with store.writer() as writer:
            shelf.put(writer, noise(CHUNK))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert shelf.incoming(folder) == []


def test_what_is_not_sealed_is_not_committed(store: Store) -> None:
    with store.writer() as writer:
        made = shelf.manifest(store, "s", "c", {"memory": shelf.put(writer, noise(CHUNK))})
        with pytest.raises(StoreError, match="not sealed"):
            writer.commit(made)
        with pytest.raises(StoreError, match="not sealed"):
            writer.verify()
    assert store.manifests() == []


def test_a_checkpoint_is_never_written_over(store: Store) -> None:
    save(store, "s", "c", {"memory": noise(CHUNK)})
    with pytest.raises(StoreError, match="exists already"):
        save(store, "s", "c", {"memory": noise(CHUNK, 1)})
    assert shelf.load(store, "s", "c") == {"memory": noise(CHUNK)}


def test_a_manifest_refers_only_to_what_is_stored(store: Store) -> None:
    with store.writer() as aborted:
        lost = shelf.put(aborted, noise(CHUNK))
    with store.writer() as writer:
        writer.seal()
        with pytest.raises(StoreError, match="1 chunks that are not stored"):
            writer.commit(shelf.manifest(store, "s", "c", {"memory": lost}))
    assert store.manifests() == []


@pytest.mark.parametrize(
    "thing",
    [Object(5, b"i" * 32, [4]), Object(4, b"i" * 33, [4]), Object(0, b"i" * 32, [0]), Object(1 << 21, b"", [1 << 21])],
)
def test_a_manifest_that_contradicts_itself_is_refused(store: Store, thing: Object) -> None:
    with store.writer() as writer:
        writer.seal()
        with pytest.raises(StoreError, match="cannot be committed"):
            writer.commit(shelf.manifest(store, "s", "c", {"memory": thing}))


@pytest.mark.parametrize("cuts", [[], [4], [5, 4, 8], [0, 8], [8, 8], [9]])
def test_cuts_that_do_not_fit_the_segment_are_refused(store: Store, cuts: list[int]) -> None:
    with store.writer() as writer, pytest.raises(StoreError):
        writer.put(memoryview(b"12345678"), cuts)


def test_chunks_and_segments_have_a_largest_size(store: Store) -> None:
    with store.writer() as writer:
        with pytest.raises(StoreError, match="chunk"):
            writer.put(memoryview(bytes((1 << 20) + 1)), [(1 << 20) + 1])
        with pytest.raises(StoreError, match="segment"):
            writer.put(memoryview(bytes(MAX_SEGMENT + 1)), shelf.cut(bytes(MAX_SEGMENT + 1), 1 << 20))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "-x", "a" * 65, "a\0", "ä", "a\n", ".hidden", "a.b"])
def test_ids_that_are_not_plain_words_never_become_paths(store: Store, name: str) -> None:
    for call in (
        lambda: store.manifest(name, "c"),
        lambda: store.manifest("s", name),
        lambda: store.delete("s", name),
        lambda: store.manifests(name),
        lambda: save(store, name, "c", {}),
        lambda: save(store, "s", name, {}),
    ):
        with pytest.raises(UsageError):
            call()


def test_listing_and_deleting(store: Store, folder: Path) -> None:
    for session, checkpoint in (("b", "2"), ("a", "1"), ("a", "0")):
        save(store, session, checkpoint, {"memory": noise(CHUNK)})
    assert store.manifests() == [("a", "0"), ("a", "1"), ("b", "2")]
    assert store.manifests("a") == [("a", "0"), ("a", "1")]
    assert store.manifests("nobody") == []
    store.delete("a", "0")
    store.delete("b", "2")
    assert store.manifests() == [("a", "1")]
    assert [path.name for path in (folder / "manifests").iterdir()] == ["a"]
    for call in (store.delete, store.manifest):
        with pytest.raises(NotFound):
            call("a", "0")
    save(store, "b", "2", {"memory": noise(CHUNK)})
    assert shelf.load(store, "b", "2") == {"memory": noise(CHUNK)}


def test_reading_refuses_lengths_that_do_not_fit(store: Store) -> None:
    thing = save(store, "s", "c", {"memory": noise(2 * CHUNK)}).objects["memory"]
    with pytest.raises(StoreError):
        store.read_into(thing.ids(), memoryview(bytearray(CHUNK)), thing.lengths)
    with pytest.raises(IntegrityError):
        store.read_into(thing.ids(), memoryview(bytearray(2 * CHUNK)), [CHUNK - 1, CHUNK + 1])


def test_opening(folder: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        Store.open(folder, KEY)
    with pytest.raises(UsageError):
        Store.open(folder, b"short", create=True)
    with Store.open(folder, KEY, create=True) as store:
        assert store.facts["direct_io"] in {True, False}
        assert store.facts["index"] == "file"
        assert KEY.hex() not in repr(vars(store))
    with pytest.raises(IntegrityError, match="another site's key"):
        Store.open(folder, bytes(32), create=True)
    record = (folder / "format").read_text()
    (folder / "format").write_text(record.replace('"format": 1', '"format": 2'))
    with pytest.raises(NewerFormat):
        Store.open(folder, KEY)
    (folder / "format").write_text("{")
    with pytest.raises(IntegrityError, match="damaged"):
        Store.open(folder, KEY)


def test_the_store_may_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    with Store.open(tmp_path / "store", KEY, create=True) as store:
        save(store, "s", "c", {"memory": noise(CHUNK)})
        assert shelf.load(store, "s", "c") == {"memory": noise(CHUNK)}


def test_buffers_hold_what_packs_need(store: Store) -> None:
    data = noise(2 * BUFFER_BYTES + CHUNK)
    with store.writer(threads=1, buffer=1 << 20) as writer:
        thing = shelf.put(writer, data)
        writer.seal()
        writer.commit(shelf.manifest(store, "s", "c", {"memory": thing}))
        writer.verify()
    assert shelf.read(store, thing) == data
