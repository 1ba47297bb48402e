from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.shelf import KEY

from torpor.store import Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store.open(folder, KEY, create=True) as opened:
        yield opened
