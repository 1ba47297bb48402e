"""Any one byte changed anywhere: found, or without consequence. Never does a checkpoint come back different."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store import shelf
from tests.store.shelf import KEY, PAGE, flip, noise, save

from torpor.errors import IntegrityError, NewerFormat
from torpor.store import Store

CONTENTS = {"memory": noise(9 * PAGE + 100), "zeros": bytes(3 * PAGE), "small": b"torpor"}
CHECKPOINTS = {"first": CONTENTS, "second": CONTENTS | {"memory": CONTENTS["memory"][:PAGE] + noise(5 * PAGE, 1)}}


@pytest.fixture(scope="module")
def original() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        with Store.open(folder, KEY, create=True) as store:
            for name, contents in CHECKPOINTS.items():
                save(store, "s", name, contents, chunk=PAGE)
        yield folder


def read_everything(folder: Path) -> int:
    """How many checkpoints come back; those that do are what was saved."""
    whole = 0
    with Store.open(folder, KEY) as store:
        for name, contents in CHECKPOINTS.items():
            try:
                found = shelf.load(store, "s", name)
            except (IntegrityError, NewerFormat):
                continue
            assert found == contents
            whole += 1
    return whole


@settings(deadline=None, max_examples=100)
@given(data=st.data(), index=st.booleans(), mask=st.integers(1, 255))
def test_a_changed_byte_is_never_returned(original: Path, data: st.DataObject, index: bool, mask: int) -> None:
    files = [*shelf.packs(original), *sorted((original / "manifests" / "s").iterdir())]
    file = data.draw(st.sampled_from(files).map(lambda path: path.relative_to(original)))
    offset = data.draw(st.integers(0, (original / file).stat().st_size - 1))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        shutil.copytree(original, folder)
        if not index:
            shelf.forget_index(folder)
        flip(folder / file, offset, mask)
        assert read_everything(folder) >= (1 if file.parts[0] == "manifests" else 0)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), mask=st.integers(1, 255))
def test_a_changed_byte_of_the_index_costs_nothing(original: Path, data: st.DataObject, mask: int) -> None:
    (index,) = shelf.index_files(original)
    offset = data.draw(st.integers(0, index.stat().st_size - 1))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        shutil.copytree(original, folder)
        flip(folder / index.name, offset, mask)
        assert read_everything(folder) == len(CHECKPOINTS)
        with Store.open(folder, KEY) as store:
            store.delete("s", "second")
            store.collect()
            assert shelf.load(store, "s", "first") == CONTENTS
            save(store, "s", "third", CONTENTS, chunk=PAGE)
            assert shelf.load(store, "s", "third") == CONTENTS
