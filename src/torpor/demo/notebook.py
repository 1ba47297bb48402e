"""The demonstration's notebook: it loads data, trains a small model, and later goes on training.

Every loss is printed with all its bits (`loss 3 0x1.8p+0`), so that two runs can be compared exactly. Batches, weights
and dropout depend on random states that live in memory only: whoever loses them gets other losses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

STEPS = 5  # training steps of each of the two training cells

_TORCH = (
    """\
import torch
from torch import nn

torch.manual_seed(7)
torch.use_deterministic_algorithms(True)
samples = torch.randn(65_536, 1024)
targets = torch.sin(samples[:, :8].sum(dim=1, keepdim=True))
print("data", samples.nbytes + targets.nbytes)
""",
    """\
model = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = torch.Generator().manual_seed(11)
steps_done = 0


def train(steps):
    global steps_done
    for _ in range(steps):
        rows = torch.randint(len(samples), (1024,), generator=batches)
        loss = nn.functional.mse_loss(model(samples[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps_done += 1
        print("loss", steps_done, loss.item().hex())


train({steps})
""",
)

_NUMPY = (
    """\
import numpy as np

randomness = np.random.default_rng(7)
samples = randomness.standard_normal((65_536, 1024), dtype=np.float32)
targets = np.sin(samples[:, :8].sum(axis=1, keepdims=True))
print("data", samples.nbytes + targets.nbytes)
""",
    """\
weights = [randomness.standard_normal(shape, dtype=np.float32) * 0.03 for shape in ((1024, 256), (256, 1))]
momenta = [np.zeros_like(weight) for weight in weights]
steps_done = 0


def train(steps):
    global steps_done
    for _ in range(steps):
        rows = randomness.integers(len(samples), size=1024)
        hidden = np.maximum(samples[rows] @ weights[0], 0)
        error = hidden @ weights[1] - targets[rows]
        behind = (error @ weights[1].T) * (hidden > 0)
        for weight, momentum, slope in zip(
            weights, momenta, (samples[rows].T @ behind, hidden.T @ error), strict=True
        ):
            momentum *= 0.9
            momentum -= 1e-3 * slope / len(rows)
            weight += momentum
        steps_done += 1
        print("loss", steps_done, float(np.mean(error**2)).hex())


train({steps})
""",
)

_LOSS = re.compile(r"^loss (\d+) (\S+)$", re.MULTILINE)
_DATA = re.compile(r"^data (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Cells:
    """The notebook's code. `library` is what trains: PyTorch or NumPy."""

    library: str
    load: str
    train: str
    train_on: str

    def as_notebook(self) -> dict[str, Any]:
        """The notebook file's content, nbformat 4."""
        written: list[dict[str, Any]] = [
            {"cell_type": "code", "id": name, "metadata": {}, "execution_count": None, "outputs": [], "source": code}
            for name, code in (("load", self.load), ("train", self.train), ("train-on", self.train_on))
        ]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": written}

    def as_script(self) -> str:
        """The same code as one program: the uninterrupted run."""
        return "\n".join((self.load, self.train, self.train_on))


def cells(torch: bool) -> Cells:
    """The notebook for PyTorch, or for NumPy alone."""
    load, train = _TORCH if torch else _NUMPY
    library = "PyTorch" if torch else "NumPy"
    return Cells(library, load, train.replace("{steps}", str(STEPS)), f"train({STEPS})\n")


def losses(printed: str) -> list[str]:
    """The losses among what was printed, in order, each as a hexadecimal float."""
    return [loss for _, loss in _LOSS.findall(printed)]


def data_bytes(printed: str) -> int:
    """Size of the data that the first cell loaded; 0 when it did not say."""
    found = _DATA.search(printed)
    return int(found[1]) if found else 0
