from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.durations import format_duration, parse_duration, spoken_duration
from torpor.errors import UsageError


@given(st.integers(1, 10**12))
def test_what_is_written_is_read_back_to_the_millisecond(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-4)


@given(st.text(max_size=8))
def test_any_text_is_a_duration_above_zero_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert parse_duration(text) > 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("0.5h", 1800), ("1d2h3m4.5s", 93784.5)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "30 m", "-5m", "0s", "1m1m", "30m1h", "1e3s", "30min", "∞s", "٣m"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "spoken"),
    [(0, "0.0 s"), (4.21, "4.2 s"), (59.7, "1 min"), (750, "12 min 30 s"), (7200, "2 h"), (180000, "2 d 2 h")],
)
def test_durations_are_spoken_in_at_most_two_units(seconds: float, spoken: str) -> None:
    assert spoken_duration(seconds) == spoken
