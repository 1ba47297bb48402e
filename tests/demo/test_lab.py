"""The demonstration's notebook and its client, on a plain JupyterLab without Torpor."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torpor.demo import notebook
from torpor.demo.household import Household
from torpor.demo.lab import Lab, find_server, new_token, server_command
from torpor.demo.story import environment
from torpor.errors import TorporError

VARIANTS = [False, *([True] if importlib.util.find_spec("torch") else [])]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Household() as household:
        token = new_token()
        found: list[Lab] = []

        def answers() -> bool:
            server = find_server(household.home / "jupyter" / "runtime", token)
            found.extend([server] if server else [])
            return bool(found)

        env = {**environment(household), "JUPYTER_TOKEN": token}
        server = household.start("jupyterlab", server_command(household.home / "notebooks"), env)
        household.wait_until("JupyterLab", answers, server, "jupyterlab")
        yield found[0]
    assert household.leftovers == []
    assert not household.home.exists()


@pytest.mark.parametrize("torch", VARIANTS)
def test_a_notebook_computes_what_the_plain_program_computes(lab: Lab, torch: bool) -> None:
    cells = notebook.cells(torch)
    plain = subprocess.run([sys.executable, "-c", cells.as_script()], capture_output=True, text=True, check=True)
    lab.save_notebook("training.ipynb", cells.as_notebook())
    kernel_id = lab.open_notebook("training.ipynb")
    with lab.connect(kernel_id) as kernel:
        printed = "".join(kernel.run(code).printed for code in lab.read_cells("training.ipynb"))
    lab.shut_down(kernel_id)
    expected = notebook.losses(plain.stdout)
    assert len(set(expected)) == 2 * notebook.STEPS
    assert notebook.losses(printed) == expected
    assert notebook.data_bytes(printed) > 200e6


def test_a_cell_that_fails_is_told(lab: Lab) -> None:
    lab.save_notebook("training.ipynb", notebook.cells(False).as_notebook())
    kernel_id = lab.open_notebook("training.ipynb")
    with lab.connect(kernel_id) as kernel, pytest.raises(TorporError, match="ZeroDivisionError: division by zero"):
        kernel.run("1 / 0")
    lab.shut_down(kernel_id)


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(TorporError, match="did not answer GET"):
        Lab("http://127.0.0.1:9/", "token").kernel_state("x")
