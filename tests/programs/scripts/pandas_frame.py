"""pandas: frames with dates, categories and text, and a groupby in the making."""

import hashlib

import numpy as np
import pandas as pd
from asked import serve

generator = np.random.default_rng(7)
frame = pd.DataFrame(
    {
        "when": pd.date_range("2026-01-01", periods=50_000, freq="min"),
        "kind": pd.Categorical(generator.choice(["red", "green", "blue"], 50_000)),
        "text": [f"row {number}" for number in range(50_000)],
        "value": generator.normal(size=50_000),
    }
).set_index("when")
groups = frame.groupby("kind", observed=True)
digest = hashlib.sha256(pd.util.hash_pandas_object(frame).to_numpy().tobytes()).hexdigest()
sums = groups["value"].sum()
state = generator.bit_generator.state


def check(_: int) -> None:
    assert hashlib.sha256(pd.util.hash_pandas_object(frame).to_numpy().tobytes()).hexdigest() == digest
    assert groups["value"].sum().equals(sums)
    assert generator.bit_generator.state == state
    assert frame["value"].resample("D").mean().notna().all()


serve(check)
