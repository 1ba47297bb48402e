"""Memory that arrives while the session runs: every byte is right, whatever the session does and whoever is killed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.sessions.arrival import Arrival

from torpor.engine.page_source import GUARDIAN_NAME, SERVER_NAME
from torpor.model import OperationKind


@contextmanager
def killing(arrival: Arrival, *names: str) -> Iterator[None]:
    """Kills processes of the page source, one after another, again and again."""
    enough = threading.Event()

    def kill() -> None:
        chosen = random.Random(1)
        while not enough.wait(chosen.uniform(0.05, 0.5)):  # time enough to serve something before the next one
            for name in names:
                arrival.kill(name)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        enough.set()
        killer.join()


def test_a_session_does_everything_to_memory_that_has_not_arrived(arrival: Arrival) -> None:
    arrival.tell("go")
    arrival.said("did everything")
    arrival.tell("check-0")
    arrival.said("checked 0 True")
    assert arrival.stage.registry.operation(arrival.worker.operation.id).ended is None
    arrival.let_arrive()
    arrival.completed()
    arrival.tell("check-1")
    arrival.said("checked 1 True")
    arrival.stage.run(arrival.stage.session(arrival.session), OperationKind.HIBERNATE)
    arrival.worker = arrival.resume()
    arrival.tell("check-2")
    arrival.said("checked 2 True")
    arrival.completed()


def test_a_session_does_everything_while_its_memory_arrives(arrival: Arrival) -> None:
    arrival.let_arrive()
    arrival.tell("go")
    arrival.said("did everything")
    arrival.tell("check-0")
    arrival.completed()
    arrival.tell("check-1")
    arrival.said("checked 1 True")


@pytest.mark.parametrize("names", [(SERVER_NAME,), (GUARDIAN_NAME,), (SERVER_NAME, GUARDIAN_NAME)])
def test_the_page_source_is_killed_again_and_again(arrival: Arrival, names: tuple[str, ...]) -> None:
    with killing(arrival, *names):
        arrival.tell("go")
        arrival.said("did everything")
        arrival.tell("check-0")
        arrival.said("checked 0 True")
    arrival.let_arrive()
    arrival.completed()
    arrival.tell("check-1")
    arrival.said("checked 1 True")
