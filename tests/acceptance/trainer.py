"""Trains a small model step by step on command, and draws: `python trainer.py FOLDER`.

A file FOLDER/train-N asks for a few steps; FOLDER/losses-N is the answer: every loss as its exact bits, and a digest
of the picture drawn so far.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("Agg")
from matplotlib import pyplot

STEPS = 3


def batches(generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        inputs = torch.randn(64, 32, generator=generator)
        yield inputs, inputs.sin().sum(dim=1, keepdim=True)


def main(folder: Path) -> None:
    torch.manual_seed(7)
    torch.set_num_threads(2)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = batches(torch.Generator().manual_seed(11))
    figure, axes = pyplot.subplots()
    losses: list[float] = []
    (line,) = axes.plot(losses)
    for number in itertools.count():
        while not (folder / f"train-{number}").exists():
            time.sleep(0.01)
        for _ in range(STEPS):
            inputs, wanted = next(data)
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        line.set_data(range(len(losses)), losses)
        axes.relim()
        axes.autoscale_view()
        picture = io.BytesIO()
        figure.savefig(picture, format="raw", dpi=40)
        answer = " ".join([*(loss.hex() for loss in losses), hashlib.sha256(picture.getvalue()).hexdigest()])
        (folder / "losses.new").write_text(answer)
        (folder / "losses.new").rename(folder / f"losses-{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
