"""A disk with no room left: a clear error, a clean store, and everything stored before still readable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.store import shelf
from tests.store.shelf import CHUNK, KEY, noise, save

from torpor.errors import StoreError
from torpor.store import Store

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "none", mount], check=True)
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def fill(store: Store, megabytes: int, seed: int) -> None:
    with store.writer() as writer:
        for number in range(megabytes):
            shelf.put(writer, noise(MIB, seed + number))
        writer.seal()


def use_up(disk: Path) -> None:
    """Leave not one free page."""
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(disk).f_bavail == 0


def test_no_room_for_the_chunks(small_disk: Path) -> None:
    folder = small_disk / "store"
    kept = {"memory": noise(4 * MIB)}
    with Store.open(folder, KEY, create=True) as store:
        save(store, "s", "kept", kept)
        before = shelf.packs(folder)
        for attempt in range(3):
            with pytest.raises(StoreError, match="no room left") as refused:
                fill(store, 30, 100 + attempt)
            assert "untouched" in refused.value.safe
            assert shelf.incoming(folder) == []
            assert shelf.packs(folder) == before
        assert shelf.load(store, "s", "kept") == kept
        save(store, "s", "smaller", {"memory": noise(8 * MIB, 7)})
        assert shelf.load(store, "s", "smaller") == {"memory": noise(8 * MIB, 7)}


def test_no_room_for_the_manifest(small_disk: Path) -> None:
    folder = small_disk / "store"
    with Store.open(folder, KEY, create=True) as store:
        with store.writer() as writer:
            made = shelf.manifest(store, "s", "c", {"memory": shelf.put(writer, noise(CHUNK))})
            writer.seal()
            use_up(small_disk)
            with pytest.raises(StoreError, match="no room left"):
                writer.commit(made)
        assert store.manifests() == []
        assert shelf.incoming(folder) == shelf.packs(folder) == []


def test_a_full_disk_still_gives_its_bytes(small_disk: Path) -> None:
    folder = small_disk / "store"
    with Store.open(folder, KEY, create=True) as store:
        save(store, "s", "kept", {"memory": noise(4 * MIB)})
    shelf.forget_index(folder)
    use_up(small_disk)
    with Store.open(folder, KEY) as store:
        assert store.facts["index"] == "memory"
        assert shelf.load(store, "s", "kept") == {"memory": noise(4 * MIB)}
        store.delete("s", "kept")
        assert store.collect() >= 4 * MIB
    (small_disk / "ballast").unlink()
    with Store.open(folder, KEY) as store:
        assert store.facts["index"] == "file"


def test_a_disk_that_fills_up_under_an_open_store(small_disk: Path) -> None:
    folder = small_disk / "store"
    with Store.open(folder, KEY, create=True) as store:
        save(store, "s", "kept", {"memory": noise(4 * MIB)})
        use_up(small_disk)
        assert shelf.load(store, "s", "kept") == {"memory": noise(4 * MIB)}
        with pytest.raises(StoreError, match="no room left"):
            fill(store, 2, 50)
        (small_disk / "ballast").unlink()
        save(store, "s", "again", {"memory": noise(4 * MIB)})
        store.delete("s", "kept")
        store.collect()
        assert shelf.load(store, "s", "again") == {"memory": noise(4 * MIB)}


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    program = f"""
import resource
from pathlib import Path
from tests.store.shelf import KEY, noise, put
from torpor.errors import StoreError
from torpor.store import Store

with Store.open(Path({str(tmp_path / "store")!r}), KEY, create=True) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        with store.writer() as writer:
            put(writer, noise(8 << 20))
            writer.seal()
    except StoreError as error:
        print(error.message)
"""
    top = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(top)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert "no room left" in found.stdout
    assert shelf.incoming(tmp_path / "store") == []
