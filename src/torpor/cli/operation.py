"""Long work as a command shows it: a bar on a terminal, plain lines elsewhere, the result as text or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torpor.cli.output import on_terminal, phases, print_json, print_line, size
from torpor.errors import TorporError
from torpor.text import shown

Event = dict[str, Any]


def carry_out(events: Iterator[Event], *, quiet: bool) -> Event:
    """Shows progress on standard error until the result comes, and gives the result. `quiet`: shows none."""
    show = _silent if quiet else _bar if on_terminal() else _plain
    result = show(events)
    if result is None:
        raise TorporError("The work ended without a result.")
    return {name: value for name, value in result.items() if name != "event"}


def print_result(verb: str, session: str, result: Event, *, as_json: bool) -> None:
    """What was made: JSON, or one line with sizes and times."""
    if as_json:
        print_json(result)
        return
    if result.get("already_running"):
        print_line(f"{session} is running already.")
        return
    sizes = f"{size(result['bytes_logical'])}, {size(result['bytes_new'])} of it new in the store"
    print_line(f"{session} {verb}: checkpoint {result['id']} ({sizes}).")
    if result.get("lost"):
        damaged = ", ".join(result.get("damaged", ()))
        print_line(result["lost"] + (f" {damaged} is damaged." if damaged else ""))
    for note in result.get("notes", ()):
        print_line(note)
    if result["seconds"]:
        print_line(phases(result["seconds"]))


def _silent(events: Iterator[Event]) -> Event | None:
    return next((event for event in events if event["event"] == "result"), None)


def _plain(events: Iterator[Event]) -> Event | None:
    """One line for each phase: this is read later, from a log."""
    phase = None
    for event in events:
        if event["event"] == "result":
            return event
        if event.get("phase") != phase:
            phase = event.get("phase")
            print_line(f"{phase}…", err=True)
    return None


def _bar(events: Iterator[Event]) -> Event | None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None, amount="")
        for event in events:
            if event["event"] == "result":
                return event
            done, total = event.get("done", 0), event.get("total") or None
            amount = f"{size(done)} of {size(total)}" if total and total > 1 << 10 else ""
            progress.update(
                task, description=shown(str(event.get("phase"))), completed=done, total=total, amount=amount
            )
    return None
