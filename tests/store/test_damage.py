"""Damaged, foreign and newer files: refused with a sentence, healed where another copy exists, never returned."""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store import shelf
from tests.store.shelf import CHUNK, KEY, PAGE, flip, noise, save

from torpor.errors import IntegrityError, NewerFormat, StoreError
from torpor.store import Store

DATA = noise(6 * CHUNK)
OTHER = noise(6 * CHUNK, 1)


@pytest.fixture
def two(folder: Path) -> Path:
    """A store with checkpoints `s/good` and `s/bad`, in a pack each; returns the pack of `bad`."""
    with Store.open(folder, KEY, create=True) as store:
        save(store, "s", "good", {"memory": OTHER})
        good = set(shelf.packs(folder))
        save(store, "s", "bad", {"memory": DATA})
    (bad,) = set(shelf.packs(folder)) - good
    return bad


def good_is_whole(store: Store) -> None:
    assert shelf.load(store, "s", "good") == {"memory": OTHER}
    store.verify(store.manifest("s", "good"))


@pytest.mark.parametrize("index", [True, False])
def test_a_damaged_chunk_is_named_and_the_others_are_whole(two: Path, folder: Path, index: bool) -> None:
    flip(two, PAGE + 2 * CHUNK + 5)
    if not index:
        shelf.forget_index(folder)
    with Store.open(folder, KEY) as store:
        made = store.manifest("s", "bad")
        for refused in (lambda: shelf.load(store, "s", "bad"), lambda: store.verify(made)):
            with pytest.raises(IntegrityError, match=f"damaged in the pack {two.name}"):
                refused()
        thing = made.objects["memory"]
        for number, chunk_id in enumerate(thing.ids()):
            out = bytearray(CHUNK)
            if number == 2:
                with pytest.raises(IntegrityError):
                    store.read_into([chunk_id], memoryview(out), [CHUNK])
                assert out == bytes(CHUNK)
            else:
                store.read_into([chunk_id], memoryview(out), [CHUNK])
                assert out == DATA[number * CHUNK : (number + 1) * CHUNK]
        good_is_whole(store)


@pytest.mark.parametrize("reading", [True, False])
def test_saving_again_heals_a_damaged_chunk(two: Path, folder: Path, reading: bool) -> None:
    flip(two, PAGE + 2 * CHUNK + 5)
    if not reading:
        shelf.forget_index(folder)  # and with it the knowledge that the pack was verified
    with Store.open(folder, KEY) as store:
        with pytest.raises(IntegrityError):
            shelf.load(store, "s", "bad") if reading else save(store, "s", "refused", {"memory": DATA})
        save(store, "s", "again", {"memory": DATA})
        assert shelf.load(store, "s", "again") == shelf.load(store, "s", "bad") == {"memory": DATA}
    shelf.forget_index(folder)
    with Store.open(folder, KEY) as store:
        assert shelf.load(store, "s", "again") == shelf.load(store, "s", "bad") == {"memory": DATA}


@pytest.mark.parametrize("size", [0, 100, PAGE, 3 * PAGE + 7, PAGE + 3 * CHUNK, PAGE + 6 * CHUNK - 1])
@pytest.mark.parametrize("index", [True, False])
def test_a_truncated_pack(two: Path, folder: Path, size: int, index: bool) -> None:
    os.truncate(two, size)
    if not index:
        shelf.forget_index(folder)
    with Store.open(folder, KEY) as store:
        with pytest.raises(IntegrityError, match="chunk"):
            shelf.load(store, "s", "bad")
        good_is_whole(store)
        if not index:
            assert list(store.facts["unreadable_packs"]) == [two.name]
        save(store, "s", "again", {"memory": DATA})
        assert shelf.load(store, "s", "again") == shelf.load(store, "s", "bad") == {"memory": DATA}


@pytest.mark.parametrize("index", [True, False])
def test_a_lost_pack(two: Path, folder: Path, index: bool) -> None:
    two.unlink()
    if not index:
        shelf.forget_index(folder)
    with Store.open(folder, KEY) as store:
        with pytest.raises(IntegrityError, match="missing"):
            shelf.load(store, "s", "bad")
        good_is_whole(store)
        save(store, "s", "again", {"memory": DATA})
        assert shelf.load(store, "s", "bad") == {"memory": DATA}


def test_a_pack_lost_while_the_store_is_open(two: Path, folder: Path) -> None:
    with Store.open(folder, KEY) as store:
        two.unlink()
        with pytest.raises(IntegrityError):
            shelf.load(store, "s", "bad")
        save(store, "s", "again", {"memory": DATA})
        assert shelf.load(store, "s", "bad") == {"memory": DATA}


def test_a_damaged_pack_index_hides_nothing_while_the_cache_knows_it(two: Path, folder: Path) -> None:
    flip(two, two.stat().st_size - 40)
    with Store.open(folder, KEY) as store:
        assert shelf.load(store, "s", "bad") == {"memory": DATA}
        good_is_whole(store)
        store.delete("s", "bad")
        assert store.collect() == 0  # what it holds is not known for sure, so it stays
    assert two.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other bytes"])
def test_a_damaged_manifest(two: Path, folder: Path, damage: str) -> None:
    path = folder / "manifests" / "s" / "bad"
    if damage == "flip":
        flip(path, path.stat().st_size // 2)
    else:
        path.write_bytes({"cut": path.read_bytes()[:-1], "empty": b"", "other bytes": b"x" * 500}[damage])
    with Store.open(folder, KEY) as store:
        with pytest.raises(IntegrityError, match="checkpoint bad is damaged"):
            store.manifest("s", "bad")
        assert store.manifests() == [("s", "bad"), ("s", "good")]
        good_is_whole(store)
        with pytest.raises(IntegrityError, match="Nothing was collected"):
            store.collect()
        assert two.exists()
        store.delete("s", "bad")
        assert store.collect() >= len(DATA)
        good_is_whole(store)


def test_a_manifest_under_another_name(two: Path, folder: Path) -> None:
    assert two.exists()
    (folder / "manifests" / "thief").mkdir()
    for path in (folder / "manifests" / "s" / "stolen", folder / "manifests" / "thief" / "bad"):
        path.write_bytes((folder / "manifests" / "s" / "bad").read_bytes())
        with Store.open(folder, KEY) as store, pytest.raises(IntegrityError, match="it is that of checkpoint bad"):
            store.manifest(path.parent.name, path.name)


def test_a_manifest_and_a_pack_of_another_site(two: Path, folder: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "foreign", bytes(32), create=True) as foreign:
        save(foreign, "s", "foreign", {"memory": DATA})
    source = tmp_path / "foreign" / "manifests" / "s" / "foreign"
    (folder / "manifests" / "s" / "foreign").write_bytes(source.read_bytes())
    (pack,) = shelf.packs(tmp_path / "foreign")
    (folder / "packs" / pack.name).write_bytes(pack.read_bytes())
    with Store.open(folder, KEY) as store:
        with pytest.raises(IntegrityError, match="another site's key"):
            store.manifest("s", "foreign")
        assert "another site's key" in store.facts["unreadable_packs"][pack.name]
        good_is_whole(store)
        with pytest.raises(IntegrityError, match="Nothing was collected"):
            store.collect()
    assert two.exists()


def test_a_newer_manifest_and_a_newer_pack(two: Path, folder: Path) -> None:
    path = folder / "manifests" / "s" / "bad"
    for file in (path, two):
        data = bytearray(file.read_bytes())
        struct.pack_into("<I", data, 8, 2)
        file.write_bytes(data)
    shelf.forget_index(folder)
    with Store.open(folder, KEY) as store:
        with pytest.raises(NewerFormat, match="format 2"):
            store.manifest("s", "bad")
        assert "format 2" in store.facts["unreadable_packs"][two.name]
        good_is_whole(store)
        with pytest.raises(NewerFormat, match="Nothing was collected"):
            store.collect()


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 100)


def cut_short(path: Path) -> None:
    os.truncate(path, 5000)


def blank(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def scramble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200:] = noise(len(data) - 200, 5)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, overwrite, cut_short, blank, scramble])
def test_the_index_is_built_again(two: Path, folder: Path, damage: Callable[[Path], None]) -> None:
    (index,) = shelf.index_files(folder)
    damage(index)
    with Store.open(folder, KEY) as store:
        good_is_whole(store)
        assert shelf.load(store, "s", "bad") == {"memory": DATA}
        with store.writer() as writer:
            shelf.put(writer, DATA)
            assert writer.stats.new == 0
        store.delete("s", "bad")
        assert store.collect() >= len(DATA)
        good_is_whole(store)
        assert store.facts["index"] == "file"
    assert not two.exists()
    assert len(shelf.index_files(folder)) == 1


def test_an_index_damaged_under_an_open_store(two: Path, folder: Path) -> None:
    assert two.exists()
    with Store.open(folder, KEY) as store:
        # Another process empties what this one relies on, by the front door: no listing shows it.
        (index,) = shelf.index_files(folder)
        os.truncate(index, 0)
        good_is_whole(store)
        assert shelf.load(store, "s", "bad") == {"memory": DATA}


def test_an_index_of_another_version_is_left_alone(two: Path, folder: Path) -> None:
    assert two.exists()
    (index,) = shelf.index_files(folder)
    db = sqlite3.connect(index)
    db.execute("PRAGMA user_version = 2")
    db.close()
    with Store.open(folder, KEY) as store:
        assert store.facts["index"] == "memory"
        good_is_whole(store)
        save(store, "s", "third", {"memory": noise(CHUNK, 3)})
        assert shelf.load(store, "s", "third") == {"memory": noise(CHUNK, 3)}
    assert shelf.index_files(folder) == [index]


def test_what_the_disk_did_not_keep_is_found_before_it_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def losing(fd: int, data: memoryview, offset: int) -> int:
        """A disk that says yes and keeps other bytes in one chunk."""
        if len(data) > PAGE + 3 * CHUNK:
            data[PAGE + 2 * CHUNK] ^= 1
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", losing)
    with store.writer() as writer:
        shelf.put(writer, DATA)
        writer.seal()
        with pytest.raises(IntegrityError, match="1 chunks of the checkpoint"):
            writer.verify()
    with store.writer() as writer:
        made = shelf.manifest(store, "s", "c", {"memory": shelf.put(writer, DATA)})
        writer.seal()
        writer.commit(made)
        with pytest.raises(IntegrityError, match="1 chunks of the checkpoint"):
            writer.verify()
    monkeypatch.undo()
    with pytest.raises(IntegrityError):
        shelf.load(store, "s", "c")
    save(store, "s", "again", {"memory": DATA})
    assert shelf.load(store, "s", "again") == {"memory": DATA}


def test_an_unreadable_store_is_a_store_error(folder: Path, two: Path) -> None:
    assert two.exists()
    (folder / "incoming").rename(folder / "elsewhere")
    with pytest.raises(StoreError):
        Store.open(folder, KEY)
