"""joblib with its pool of worker processes and an array that they share through memory-mapped files."""

import os

import numpy as np
from asked import serve
from joblib import Parallel, delayed

data = np.arange(200_000, dtype=np.float64)


def work(shared: np.ndarray, part: int) -> tuple[int, str, float]:
    return os.getpid(), type(shared).__name__, float(shared[part::4].sum())


pool = Parallel(n_jobs=2, max_nbytes="100K")
pool.__enter__()
pool(delayed(work)(data, part) for part in range(4))
known = set(pool._backend._workers._processes)


def check(_: int) -> None:
    found = pool(delayed(work)(data, part) for part in range(4))
    assert [total for _, _, total in found] == [float(data[part::4].sum()) for part in range(4)]
    assert {kind for _, kind, _ in found} == {"memmap"}, found
    assert len(known) == 2
    assert {pid for pid, _, _ in found} <= known == set(pool._backend._workers._processes)


serve(check)
