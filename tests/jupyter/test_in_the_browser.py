"""What wakes a kernel and what does not, as people see it: a real JupyterLab in a real browser."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser import Browser
from tests.installation import Installation, eventually
from tests.jupyter.labpage import LabServer, NotebookPage

from torpor.errors import Conflict
from torpor.model import OperationKind

SLIDER = """
import ipywidgets
slider = ipywidgets.IntSlider(value=3)
shown = ipywidgets.Label()
slider.observe(lambda change: setattr(shown, 'value', f'{x} and {change.new}'), 'value')
ipywidgets.VBox([slider, shown])
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def lab(shared_agent: Installation) -> Iterator[LabServer]:
    lab = LabServer(shared_agent.home / "lab", shared_agent.environment)
    lab.start()
    yield lab
    lab.close()


class Opened:
    """A notebook in a page of its own, its kernel's session, and what happens to that."""

    def __init__(self, name: str, agent: Installation, lab: LabServer, browser: Browser, *cells: str) -> None:
        self._agent, self._lab, self._browser = agent, lab, browser
        self.notebook = f"{name}.ipynb"
        lab.write(self.notebook, "x = 41", "x + 1", *cells)
        self.page = self.second_page()
        self.page.run(0)
        self.page.run(1)
        self.page.wait_for_output(1, "42")
        self.session: str = self.newest()["id"]

    def second_page(self) -> NotebookPage:
        return NotebookPage(self._browser, self._lab.address(self.notebook))

    def newest(self) -> dict[str, Any]:
        """The session of the kernel that was started last."""
        return max(self._agent.client.sessions(), key=lambda session: float(session["created"]))

    def hibernate(self) -> None:
        """As soon as the kernel has nothing to do."""

        def is_saved() -> bool:
            try:
                self._agent.operate(self.session, "hibernate")
            except Conflict:
                return False
            return True

        eventually(is_saved, bool)
        self.must_sleep()

    def must_sleep(self) -> None:
        assert self._agent.client.session(self.session)["state"] == "hibernated"
        self.must_not_have_woken()

    def must_not_have_woken(self) -> None:
        """The last thing that was ever done with the session is its hibernation."""
        with self._agent.registry() as registry:
            last = registry.last_operation(self.session)
        assert last is not None
        assert (last.kind, last.outcome) == (OperationKind.HIBERNATE, "completed")

    def must_be_awake(self) -> None:
        self._agent.wait_for_state(self.session, "running")

    def is_asleep(self) -> None:
        """Waits until somebody else has put it to sleep."""
        self._agent.wait_for_state(self.session, "hibernated")
        self.must_sleep()

    def relay(self) -> int:
        """The pid of the process that is the kernel for the server; 0 while there is none."""
        children = Path(f"/proc/{self._lab.process.pid}/task/{self._lab.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
        file = self._agent.client.session(self.session)["labels"]["jupyter.connection_file"].encode()
        return next((pid for pid, command in commands.items() if file in command), 0)

    def must_have_ended(self) -> None:
        """Without having been woken for it, and with its checkpoint kept."""
        ended = self._agent.wait_for_state(self.session, "ended")
        self.must_not_have_woken()
        assert len(ended["checkpoints"]) == 1


@pytest.fixture
def notebook(
    request: pytest.FixtureRequest, shared_agent: Installation, lab: LabServer, browser: Browser
) -> Iterator[Callable[..., Opened]]:
    """Opens a notebook that has these cells after `x = 41` and `x + 1`."""
    yield lambda *cells: Opened(request.node.name, shared_agent, lab, browser, *cells)
    browser.close_pages()
    for session in shared_agent.client.sessions():
        shared_agent.client.remove(session["id"], force=True)


def test_a_page_opens_normally_and_wakes_nothing_until_a_cell_is_run(notebook: Callable[..., Opened]) -> None:
    opened = notebook()
    opened.page.save()
    opened.hibernate()
    opened.page.reload()
    second = opened.second_page()
    opened.must_sleep()
    assert opened.page.output(1) == second.output(1) == "42"
    second.run(1)
    opened.must_be_awake()
    second.wait_for_output(1, "42")
    second.wait_for_kernel("Idle")
    opened.hibernate()
    opened.page.run(1)
    opened.page.wait_for_output(1, "42")


def test_a_cell_that_waits_says_so_and_its_output_replaces_that(
    notebook: Callable[..., Opened], shared_agent: Installation
) -> None:
    opened = notebook("import time\nfor n in range(3): print(n, flush=True)\ntime.sleep(0.1)")
    opened.hibernate()
    shared_agent.kill()  # so that it waits for long enough
    opened.page.run(2)
    eventually(lambda: opened.page.output(2), lambda text: "This cell runs as soon as it is back." in text)
    shared_agent.start()
    opened.page.wait_for_output(2, "0\n1\n2\n")
    opened.page.wait_for_kernel("Idle")
    opened.must_be_awake()


def test_completion_wakes(notebook: Callable[..., Opened]) -> None:
    opened = notebook("value_of_all = 6 * 7", "value_of")
    opened.page.run(2)
    opened.hibernate()
    opened.page.put_cursor(3)
    opened.page.page.press("Tab")
    opened.must_be_awake()
    opened.page.wait_for_kernel("Idle")
    opened.page.put_cursor(3)
    opened.page.page.press("Tab")

    def is_completed() -> bool:
        """The list may be open already, from the question that woke the kernel: then the key took its entry."""
        if opened.page.page.evaluate("!!document.querySelector('.jp-Completer-match, .jp-Completer-item')"):
            opened.page.page.press("Enter")
        return opened.page.source(3) == "value_of_all"

    eventually(is_completed, bool)
    opened.page.run(3)
    opened.page.wait_for_output(3, "42")


def test_a_slider_wakes_and_its_callback_runs(notebook: Callable[..., Opened]) -> None:
    opened = notebook(SLIDER)
    opened.page.run(2)
    handle, text = "document.querySelector('.noUi-handle')", "document.querySelector('.jp-Notebook').textContent"
    opened.page.page.wait(handle)
    opened.hibernate()
    opened.page.page.click(handle)
    opened.page.page.press("ArrowRight")
    opened.must_be_awake()
    opened.page.page.wait(f"{text}.includes('41 and 4')")
    opened.page.save()
    opened.hibernate()
    opened.page.reload()
    opened.must_sleep()
    opened.page.run(1)  # a page that was loaded meanwhile shows widgets again as soon as their kernel is awake
    opened.page.page.click(handle)
    opened.page.page.press("ArrowRight")
    opened.page.page.wait(f"{text}.includes('41 and 5')")


def test_restart_from_the_menu_does_not_wake(notebook: Callable[..., Opened]) -> None:
    opened = notebook()
    opened.hibernate()
    opened.page.choose("Kernel", "kernelmenu:restart")
    opened.page.accept()
    opened.must_have_ended()
    opened.page.wait_for_kernel("Idle")
    assert opened.newest()["id"] != opened.session
    opened.page.run(1)
    eventually(lambda: opened.page.output(1), lambda text: "NameError" in text)


def test_shutdown_from_the_menu_does_not_wake(notebook: Callable[..., Opened]) -> None:
    opened = notebook()
    opened.hibernate()
    opened.page.choose("Kernel", "kernelmenu:shutdown")
    opened.must_have_ended()
    opened.page.page.wait("document.querySelector('.jp-Toolbar-kernelName').textContent == 'No Kernel'")
    assert opened.newest()["id"] == opened.session


def test_a_killed_relay_is_started_again_and_finds_its_session(notebook: Callable[..., Opened]) -> None:
    opened = notebook()
    opened.hibernate()
    os.kill(opened.relay(), signal.SIGKILL)
    opened.page.accept()  # that the kernel appears to have died
    opened.page.wait_for_kernel("Idle")
    opened.must_sleep()
    opened.page.run(1)
    opened.must_be_awake()
    opened.page.wait_for_output(1, "42")
    os.kill(opened.relay(), signal.SIGKILL)  # now with the kernel awake
    opened.page.accept()
    opened.page.wait_for_kernel("Idle")
    opened.page.run(1)
    opened.page.wait_for_output(1, "42")
    assert opened.newest()["id"] == opened.session


def test_a_killed_server_leaves_its_kernels_asleep(notebook: Callable[..., Opened], lab: LabServer) -> None:
    opened = notebook()
    opened.page.save()
    lab.kill()
    opened.is_asleep()
    lab.start()
    page = opened.second_page()
    page.run(1)
    eventually(lambda: page.output(1), lambda text: "NameError" in text)  # a kernel of its own
    opened.must_sleep()
