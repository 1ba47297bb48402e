"""Programs that Torpor did not start: each is ended with everything below it, whatever became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.adopt.programs import Program
from tests.sessions.stage import Stage, a_stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    yield from a_stage()


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    """Starts a program as a shell or a service manager would."""
    started: list[Program] = []

    def begin(*argv: str, **how: object) -> Program:
        started.append(Program(tmp_path_factory.mktemp("program"), argv, **how))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for program in started:
        program.close()
