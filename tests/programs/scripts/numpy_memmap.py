"""A NumPy array that is a file, mapped to be written."""

import numpy as np
from asked import FOLDER, serve

mapped = np.memmap(FOLDER / "array", dtype=np.int64, mode="w+", shape=(500_000,))
mapped[:] = np.arange(500_000)
view = mapped[1000:2000]


def check(number: int) -> None:
    assert (view == np.arange(1000, 2000)).all()
    assert (mapped[2000:] == np.arange(2000, 500_000)).all()
    mapped[number] = -number
    mapped.flush()
    read = np.fromfile(FOLDER / "array", dtype=np.int64)
    assert (read[: number + 1] == -np.arange(number + 1)).all()
    assert (read == mapped).all()


serve(check)
