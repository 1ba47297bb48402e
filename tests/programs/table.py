"""The table of programs that were tried, docs/programs.md: written by a whole run, one row by each of its tests."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[2] / "docs" / "programs.md"
HEAD = """# Programs that were tried

Written by `tests/programs`: each program was started by `torpor run -d`, or as a kernel by Jupyter, hibernated and
resumed, and then asked whether its own state is as it was. Versions are those of `requirements/` and of Debian.

| program | result | what was checked |
|---|---|---|
"""
PROGRAMS = (
    "PyTorch, DataLoader workers",
    "joblib",
    "pandas",
    "SQLite, WAL mode",
    "NumPy, memory-mapped file",
    "HDF5 (h5py)",
    "asyncio server",
    "uvloop server",
    "Dask, workers as threads",
    "Dask, workers as processes",
    "bash with children",
    "`%%bash` children of a notebook",
    "R",
    "R kernel (IRkernel)",
    "tmux",
)


class Table:
    """Collects rows; `write` does nothing until every program has one."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, str]] = {}

    def add(self, program: str, result: str, checked: str) -> None:
        """One program's row."""
        assert program in PROGRAMS
        self._rows[program] = (result, checked)

    def write(self) -> None:
        """Writes the file when this run has tried everything."""
        if set(self._rows) == set(PROGRAMS):
            rows = [f"| {program} | {' | '.join(self._rows[program])} |\n" for program in PROGRAMS]
            FILE.write_text(HEAD + "".join(rows))
