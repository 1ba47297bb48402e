from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.jupyter.conftest import home, installation, torpor_by_default
from tests.programs.table import Table

__all__ = ["home", "installation", "torpor_by_default"]  # what kernels need


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """What came of each program."""
    table = Table()
    yield table
    table.write()
