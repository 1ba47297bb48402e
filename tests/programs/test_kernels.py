"""What runs in notebooks beside Python code: another language's kernel, and children that cells started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.installation import Installation, eventually
from tests.jupyter.conftest import Kernel
from tests.jupyter.talk import run
from tests.jupyter.test_relay_with_agent import hibernate
from tests.programs.table import Table


@pytest.fixture
def kernel(request: pytest.FixtureRequest, installation: Installation, torpor_by_default: None) -> Iterator[Kernel]:
    """The kernel of the name that the test asks for, started through Torpor."""
    kernel = Kernel(request.param)
    kernel.start()
    yield kernel
    kernel.close()


R = """
set.seed(1)
counter <- local({n <- 0; function() {n <<- n + 1; n}})
counter()
model <- lm(dist ~ speed, cars)
fitted <- coef(model)
notes <- file("NOTES", "w")
writeLines("before", notes)
seed <- .Random.seed
expected <- runif(3)
.Random.seed <- seed
"""
R_AGAIN = """
writeLines(paste("after", counter()), notes)
flush(notes)
cat(identical(fitted, coef(model)), identical(expected, runif(3)), summary(model)$r.squared > 0.6)
.Random.seed <- seed
"""


@pytest.mark.parametrize("kernel", ["ir"], indirect=True)
def test_a_kernel_for_r(kernel: Kernel, installation: Installation, table: Table, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    assert run(kernel.client, R.replace("NOTES", str(notes))).status == "ok"
    for _ in range(3):
        hibernate(installation)
        answer = run(kernel.client, R_AGAIN)
        assert (answer.status, answer.stdout) == ("ok", "TRUE TRUE TRUE")
    assert notes.read_text().splitlines() == ["before", "after 2", "after 3", "after 4"]
    checked = "a fitted model, the random number generator, a closure, a file that is open; the next cell wakes it"
    table.add("R kernel (IRkernel)", "works", checked)


def grows(path: Path) -> None:
    """Waits until a file has some lines more."""
    eventually(path.exists, bool)
    before = path.stat().st_size
    eventually(lambda: path.stat().st_size, lambda size: size > before + 50)


BACKGROUND = """%%bash --bg --proc job
n=0
while :; do n=$((n + 1)); echo $n >> LINES; sleep 0.02; done
"""
LEFT_BEHIND = """%%bash
(while read -r line; do echo "heard $line" >> HEARD; done < <(tail -f LINES)) > /dev/null 2>&1 &
"""


@pytest.mark.parametrize("kernel", ["python3"], indirect=True)
def test_children_of_cells(kernel: Kernel, installation: Installation, table: Table, tmp_path: Path) -> None:
    lines, heard = tmp_path / "lines", tmp_path / "heard"

    def cell(source: str) -> str:
        answer = run(kernel.client, source.replace("LINES", str(lines)).replace("HEARD", str(heard)))
        assert answer.status == "ok", answer.reply
        return answer.stdout

    def go_on() -> None:
        """Both children: no line is left out, and none comes twice."""
        grows(lines)
        grows(heard)
        numbers = lines.read_text().splitlines()
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
        said = heard.read_text().splitlines()
        assert said == [f"heard {number}" for number in range(1, len(said) + 1)]

    cell(BACKGROUND)
    eventually(lines.exists, bool)
    cell(LEFT_BEHIND)
    go_on()
    for _ in range(3):
        hibernate(installation)
        assert cell("print(job.returncode)") == "None\n"
        go_on()
        assert cell("%%bash\necho $((6 * 7)) | cat") == "42\n"
    table.add(
        "`%%bash` children of a notebook",
        "works",
        "a job in the background of a cell, what another cell left running, and a new cell; no line lost, none twice",
    )
