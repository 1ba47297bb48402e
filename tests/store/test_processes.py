"""Several processes and threads on one store: nobody takes away what another one uses."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.store import shelf
from tests.store.crasher import contents
from tests.store.shelf import CHUNK, KEY, noise, save

from torpor.errors import Conflict, StoreError
from torpor.store import Store

CRASHER = Path(__file__).with_name("crasher.py")


@contextmanager
def writing_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that makes one checkpoint after the other; the first is committed."""
    process = subprocess.Popen([sys.executable, CRASHER, folder, "0"], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "c1\n"
            yield process
        finally:
            process.kill()


def test_two_processes_write_at_once(store: Store, folder: Path) -> None:
    with writing_process(folder) as process:
        mine = {f"m{number}": noise(4 * CHUNK, number) + contents("c1") for number in range(20)}
        for name, data in mine.items():
            save(store, "mine", name, {"memory": data})
        assert process.stdout is not None
        for expected in range(2, 6):
            assert process.stdout.readline() == f"c{expected}\n"
    for name, data in mine.items():
        assert shelf.load(store, "mine", name) == {"memory": data}
    for session, name in store.manifests("s"):
        assert shelf.load(store, session, name) == {"memory": contents(name)}
    store.collect()
    for session, name in store.manifests():
        store.verify(store.manifest(session, name))


def test_collecting_while_another_process_writes(store: Store, folder: Path) -> None:
    with writing_process(folder):
        for number in range(30):
            save(store, "mine", "c", {"memory": noise(CHUNK, number)})
            store.delete("mine", "c")
            with suppress(Conflict):  # then the other one was in the middle of a checkpoint
                store.collect()
    store.collect()
    assert shelf.incoming(folder) == []
    for session, name in store.manifests():
        assert shelf.load(store, session, name) == {"memory": contents(name)}


def test_what_a_writer_refers_to_is_not_collected(store: Store, folder: Path) -> None:
    data = noise(4 * CHUNK)
    save(store, "s", "old", {"memory": data})
    with store.writer() as writer:
        thing = shelf.put(writer, data)
        assert writer.stats.new == 0
        store.delete("s", "old")
        with Store.open(folder, KEY) as other, pytest.raises(Conflict, match="in use"):
            other.collect()
        writer.seal()
        writer.commit(shelf.manifest(store, "s", "new", {"memory": thing}))
    assert store.collect() == 0
    assert shelf.load(store, "s", "new") == {"memory": data}


def test_what_a_reader_holds_is_not_collected(store: Store, folder: Path) -> None:
    data = noise(4 * CHUNK)
    made = save(store, "s", "c", {"memory": data})
    with store.reading():
        with store.reading():
            store.delete("s", "c")
        with Store.open(folder, KEY) as other, pytest.raises(Conflict):
            other.collect()
        assert shelf.read(store, made.objects["memory"]) == data
    assert store.collect() >= len(data)


def test_the_packs_of_an_unfinished_checkpoint_are_its_own(store: Store, folder: Path) -> None:
    data = noise(4 * CHUNK)
    with Store.open(folder, KEY) as other, other.writer() as unfinished:
        shelf.put(unfinished, data)
        unfinished.seal()
        unfinished.verify()
        save(store, "s", "c", {"memory": data})  # must not refer to what may still be aborted
    assert store.collect() == 0
    assert shelf.load(store, "s", "c") == {"memory": data}


def test_readers_of_another_process_see_a_new_checkpoint(store: Store, folder: Path) -> None:
    with writing_process(folder):
        assert shelf.load(store, "s", "c1") == {"memory": contents("c1")}


def test_a_damaged_index_is_replaced_while_others_work(store: Store, folder: Path) -> None:
    save(store, "s", "first", {"memory": noise(CHUNK)})
    with Store.open(folder, KEY) as other:
        assert other._index.rebuild()  # what a reader does that finds the cache wrong
        for number, writing in enumerate((store, other, store, other)):
            save(writing, "s", f"c{number}", {"memory": noise(CHUNK) + noise(CHUNK, number + 1)})
            for reading in (store, other):
                assert shelf.load(reading, "s", f"c{number}") == {"memory": noise(CHUNK) + noise(CHUNK, number + 1)}
        assert len(shelf.index_files(folder)) == 1


def test_aborting_frees_a_thread_that_waits_for_the_disk(store: Store, folder: Path) -> None:
    started = threading.Event()
    writer = store.writer(threads=1, buffer=1 << 20)

    def put_until_it_fails() -> StoreError:
        for seed in range(1 << 20):
            try:
                shelf.put(writer, noise(1 << 20, seed))
            except StoreError as error:
                return error
            started.set()
        raise AssertionError("the abort went unnoticed")

    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(put_until_it_fails)
        started.wait()
        writer.abort()
        assert "abandoned" in putting.result().message or "no more" in putting.result().message
    assert shelf.incoming(folder) == []
