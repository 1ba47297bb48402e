from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sessions.arrival import Arrival
from tests.sessions.stage import Stage, a_stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    """An installation without an agent, ended and removed afterwards."""
    yield from a_stage()


@pytest.fixture
def arrival(stage: Stage) -> Arrival:
    """A session that runs while nothing but what it touches arrives."""
    return Arrival(stage)
