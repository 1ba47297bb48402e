"""HDF5: a file that is open for writing, with a compressed dataset that grows."""

import h5py
import numpy as np
from asked import FOLDER, serve

file = h5py.File(FOLDER / "data.h5", "w")
grows = file.create_dataset("grows", (0,), maxshape=(None,), chunks=(4096,), compression="gzip", dtype="f8")
file.attrs["run"] = "one"


def check(number: int) -> None:
    size = len(grows)
    assert size == number * 10_000
    grows.resize((size + 10_000,))
    grows[size:] = np.arange(size, size + 10_000)
    assert (grows[:] == np.arange(size + 10_000)).all()
    assert file.attrs["run"] == "one"
    file.flush()


serve(check)
