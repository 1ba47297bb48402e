"""How the command line shows things: tables, sizes, times, errors, JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from torpor.errors import TorporError
from torpor.text import json_escaped, shown

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json_escaped(json.dumps(value, indent=2, ensure_ascii=False)))


def print_line(text: str, *, err: bool = False) -> None:
    """One line for people, whatever is in it."""
    click.echo(shown(text), err=err)


def show_error(error: TorporError, *, as_json: bool) -> None:
    """An error on standard error: its sentences, or one line of JSON with the same parts and its exit status."""
    if as_json:
        click.echo(json.dumps({"error": error.as_dict(), "exit_status": error.exit_status}), err=True)
        return
    print_line(f"torpor: {error.message}", err=True)
    for part in (error.safe, error.hint):
        if part:
            print_line(f"  {part}", err=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns aligned to their widest cell; numbers are the caller's to format."""
    lines = [[shown(cell) for cell in row] for row in [heads, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for row in lines:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


def size(count: float) -> str:
    """Bytes for people: `0 B`, `1.5 MiB`."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def clock(moment: float | None) -> str:
    """A moment in local time, or a dash."""
    return "-" if not moment else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def phases(seconds: dict[str, float]) -> str:
    """Seconds per phase in one line."""
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())


def on_terminal() -> bool:
    """Whether somebody watches: standard error is where progress goes."""
    return sys.stderr.isatty()
