"""kill -9 of a process that writes: what was committed is whole, and the rest can be collected."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.store import shelf
from tests.store.crasher import contents
from tests.store.shelf import CHUNK, KEY, noise, save

from torpor.errors import StoreError
from torpor.store import Store

CRASHER = Path(__file__).with_name("crasher.py")


def is_in_order(folder: Path, announced: list[str]) -> None:
    """Every announced checkpoint exists, every one that exists is whole, and nothing else is left after collecting."""
    try:
        store = Store.open(folder, KEY)
    except StoreError:
        assert announced == []  # killed while the store was being made: making it again must work
        store = Store.open(folder, KEY, create=True)
    with store:
        names = [name for _, name in store.manifests()]
        assert set(announced) <= set(names)
        for name in names:
            assert shelf.load(store, "s", name) == {"memory": contents(name)}
            store.verify(store.manifest("s", name))
        store.collect()
        assert shelf.incoming(folder) == []
        assert len(shelf.packs(folder)) <= len(names)
        for name in names:
            assert shelf.load(store, "s", name) == {"memory": contents(name)}
        save(store, "s", "next", {"memory": noise(CHUNK)})
        for name in [*names, "next"]:
            store.delete("s", name)
        store.collect()
        assert shelf.packs(folder) == []


def test_killed_after_each_write(tmp_path: Path) -> None:
    for count in range(1, 200):
        folder = tmp_path / str(count)
        result = subprocess.run(
            [sys.executable, CRASHER, folder, str(count)], stdout=subprocess.PIPE, text=True, timeout=60, check=False
        )
        if folder.exists():
            is_in_order(folder, result.stdout.split())
        if result.returncode == 0:
            break
        assert result.returncode == -9
    else:
        pytest.fail("the process never came to its end")
    assert count > 25


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    process = subprocess.Popen([sys.executable, CRASHER, tmp_path / "store", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.3))  # the moment itself
        process.kill()
        announced = ["c1", *process.stdout.read().split()]
    is_in_order(tmp_path / "store", announced)
