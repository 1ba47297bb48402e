"""What the relay says of its kernel: a page that is loaded is not use of it."""

from __future__ import annotations

import pytest

from torpor.jupyter.ledger import Ledger
from torpor.jupyter.wire import Header, Message


def a_request(msg_type: str) -> Message:
    return Message([], 0, Header(msg_id=f"id of {msg_type}", msg_type=msg_type), Header())


def worked_off(ledger: Ledger, request: Message, *, is_use: bool) -> list[str]:
    """The states that are reported from the request's arrival until it is worked off."""
    states = []
    ledger.noticed(request, is_use=is_use)
    ledger.forwarded("shell", request)
    states.append(ledger.report(0).execution_state)
    ledger.published(request.header.msg_id, "busy")
    states.append(ledger.report(0).execution_state)
    ledger.replied(request.header.msg_id)
    states.append(ledger.report(0).execution_state)
    ledger.published(request.header.msg_id, "idle")
    states.append(ledger.report(0).execution_state)
    return states


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.connected()
    return ledger


def test_a_cell_is_use_of_the_kernel(ledger: Ledger) -> None:
    idle = ledger.report(0)
    assert worked_off(ledger, a_request("execute_request"), is_use=True) == ["busy", "busy", "busy", "idle"]
    assert ledger.report(0).since > idle.since
    assert ledger.report(0).last_message > idle.last_message


def test_a_page_that_loads_leaves_the_kernel_idle_since_when_it_was(ledger: Ledger) -> None:
    idle = ledger.report(0)
    assert worked_off(ledger, a_request("kernel_info_request"), is_use=False) == ["idle"] * 4
    assert ledger.report(0) == idle
    assert ledger.in_flight == 0


def test_a_page_that_loads_while_a_cell_runs_does_not_hide_the_cell(ledger: Ledger) -> None:
    cell = a_request("execute_request")
    ledger.noticed(cell, is_use=True)
    ledger.forwarded("shell", cell)
    assert worked_off(ledger, a_request("kernel_info_request"), is_use=False) == ["busy"] * 4
    assert ledger.report(0).queued == 1
