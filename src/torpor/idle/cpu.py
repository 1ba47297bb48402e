"""Reading CPU samples: when the tree last computed, and how much it does now."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torpor.idle.facts import CpuSample


def last_use(samples: Sequence[CpuSample], threshold: float, window: float) -> float | None:
    """Time until which the tree may have used more than `threshold` of a core within any `window` seconds.

    Counts from the first sample at the latest, since nothing is known of the time before; None without two samples.
    All that lies between two samples may have been used at any moment between them, so that a missing sample can only
    make the answer later. A total that shrinks was a use: a process ended uncounted.
    """
    if len(samples) < 2:
        return None
    budget = threshold * window
    spent = [0.0]
    for before, after in itertools.pairwise(samples):
        shrunk = after.seconds < before.seconds
        spent.append(spent[-1] + (2 * budget + 1.0 if shrunk else after.seconds - before.seconds))
    end = len(samples) - 1
    for start in range(len(samples) - 2, -1, -1):
        while samples[end - 1].at - samples[start + 1].at > window:
            end -= 1
        if spent[end] - spent[start] > budget:
            return samples[start + 1].at
    return samples[0].at


def rate(samples: Sequence[CpuSample], window: float) -> tuple[float, float] | None:
    """Fraction of a core used of late, and over how many seconds (about `window`); None without two samples."""
    if len(samples) < 2:
        return None
    newest = samples[-1]
    oldest = next((s for s in reversed(samples[:-1]) if newest.at - s.at >= window), samples[0])
    length = newest.at - oldest.at
    return (max(newest.seconds - oldest.seconds, 0.0) / length, length) if length > 0 else None
