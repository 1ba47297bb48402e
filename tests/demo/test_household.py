"""What the demonstration starts ends with it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from torpor.demo import machine
from torpor.demo.household import Household
from torpor.errors import SetupError


def test_the_household_ends_what_its_children_leave_behind() -> None:
    program = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(600)\n"
    with Household() as household:
        household.start("daemon", [sys.executable, "-c", program], dict(os.environ)).wait()
        daemons = machine.identify(machine.descendants(os.getpid()))
        assert daemons
    assert household.leftovers == []
    assert machine.still_there(daemons) == []
    assert not household.home.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_household_and_everything_in_it(number: signal.Signals) -> None:
    ended = KeyboardInterrupt if number is signal.SIGINT else SystemExit
    household = Household()
    children = []

    def interrupted() -> None:
        with household:
            children.append(household.start("child", ["sleep", "600"], dict(os.environ)))
            signal.raise_signal(number)

    with pytest.raises(ended):
        interrupted()
    assert children[0].poll() is not None
    assert not household.home.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_child_that_ends_too_early_is_told_with_its_last_words() -> None:
    with Household() as household:
        child = household.start("child", ["sh", "-c", "echo no port; exit 3"], dict(os.environ))
        with pytest.raises(SetupError, match=r"ended with status 3.*It said last: no port"):
            household.wait_until("The child", Path("/nowhere").exists, child, "child")
