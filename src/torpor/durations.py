"""Durations as people write them: `90s`, `30m`, `2h`, `1d`, `1h30m`."""

from __future__ import annotations

import itertools
import math
import re

from torpor.errors import UsageError

SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WHOLE = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[dhms])+")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dhms])")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90s` or `1h30m`; units d, h, m, s from large to small, each at most once.

    Raises UsageError when it is written otherwise, or is not longer than nothing.
    """
    if not _WHOLE.fullmatch(text):
        raise UsageError(f"{text!r} is not a duration.", hint="Write a number and a unit: 90s, 30m, 2h, 1d or 1h30m.")
    parts = _PART.findall(text)
    units = [unit for _, unit in parts]
    if units != sorted(set(units), key="dhms".index):
        raise UsageError(f"The units in {text!r} must go from large to small, each once.", hint="For example 1h30m.")
    seconds = math.fsum(float(number) * SECONDS[unit] for number, unit in parts)
    if not 0 < seconds < math.inf:
        raise UsageError(f"The duration {text!r} must be longer than nothing and end some day.")
    return seconds


def format_duration(seconds: float) -> str:
    """The duration as `parse_duration` reads it, to the millisecond: 5400 is `1h30m`."""
    milliseconds = round(seconds * 1000)
    parts = []
    for unit in "dhm":
        count, milliseconds = divmod(milliseconds, SECONDS[unit] * 1000)
        parts += [f"{count}{unit}"] if count else []
    if milliseconds or not parts:
        parts.append(f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s")
    return "".join(parts)


def spoken_duration(seconds: float) -> str:
    """The duration for a sentence, in at most two units: `4.2 s`, `12 min 30 s`, `2 d 3 h`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for (name, size), (small_name, small) in itertools.pairwise(_SPOKEN):
        if whole >= size:
            large, rest = divmod(whole, size)
            return f"{large} {name}" + (f" {rest // small} {small_name}" if rest // small else "")
    return f"{whole} s"


_SPOKEN = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
