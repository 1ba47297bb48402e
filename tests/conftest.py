"""Fixtures for everything that needs a running agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from tests.installation import Installation, installations

settings.register_profile("no-clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clocks")  # how fast a machine is says nothing of what it computes


@pytest.fixture
def make_installation() -> Iterator[Callable[[], Installation]]:
    """For tests that need several installations, or none that runs yet."""
    yield from installations()


@pytest.fixture
def agent(make_installation: Callable[[], Installation]) -> Installation:
    """A running agent of this test's own."""
    installation = make_installation()
    installation.start()
    return installation


@pytest.fixture(scope="module")
def shared_agent() -> Iterator[Installation]:
    """A running agent that the tests of one file share."""
    for make in installations():
        installation = make()
        installation.start()
        yield installation
