"""A keeper of its own for each test, and every process that it started ended afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engine.stage import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    try:
        yield made
    finally:
        made.close()
