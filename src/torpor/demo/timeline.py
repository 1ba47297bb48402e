"""The demonstration's timeline: one aligned line for each thing that happened, and the same as data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

STYLES = {"·": "dim", "✓": "green", "z": "magenta", "✗": "bold red"}
PLAIN = str.maketrans({"·": "-", "✓": "+", "✗": "!", "→": ">", "…": ".", "é": "e"})
NAME_WIDTH = 16


@dataclass(frozen=True)
class Event:
    """One line: when it ended (seconds since the beginning), how long it took, what it was."""

    at: float
    seconds: float | None
    mark: str
    name: str
    text: str


class Timeline:
    """Prints events as they happen, unless `quiet`; on a terminal with colours and a line that says what is awaited."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.events: list[Event] = []
        self._console = console
        self._quiet = quiet
        self._began = time.monotonic()

    @contextmanager
    def step(self, name: str, awaited: str, mark: str = "·") -> Iterator[Step]:
        """Times a step; its line is printed when it has ended well."""
        step = Step(lambda _: None)
        began = time.monotonic()
        if self._quiet or not self._console.is_terminal:
            yield step
        else:
            with self._console.status(Text(awaited, style="dim")) as status:
                step = Step(lambda text: status.update(Text(text, style="dim")))
                yield step
        self._add(step.mark or mark, name, step.text, time.monotonic() - began)

    def note(self, mark: str, name: str, text: str) -> None:
        """Prints a line for something that took no time."""
        self._add(mark, name, text, None)

    def heading(self, text: str) -> None:
        """Prints a line of its own."""
        if not self._quiet:
            self._console.print(self._printable(text), style="bold", soft_wrap=True, highlight=False, markup=False)

    def as_data(self) -> list[dict[str, Any]]:
        """Every event: `at` and `seconds`, `name`, `text`."""
        return [
            {
                "at": round(event.at, 3),
                "seconds": None if event.seconds is None else round(event.seconds, 3),
                "name": event.name,
                "text": event.text,
            }
            for event in self.events
        ]

    def _add(self, mark: str, name: str, text: str, seconds: float | None) -> None:
        event = Event(time.monotonic() - self._began, seconds, mark, name, text)
        self.events.append(event)
        if self._quiet:
            return
        line = Text()
        took = "" if seconds is None else f"{seconds:.2f} s"
        line.append(f"{event.at:7.1f} s{took:>10} ", style="dim")
        line.append(self._printable(f" {mark} "), style=STYLES[mark])
        line.append(self._printable(f"{name:<{NAME_WIDTH}}"), style="bold")
        line.append(self._printable(text))
        self._console.print(line, soft_wrap=True, highlight=False)

    def _printable(self, text: str) -> str:
        """The text for a terminal or file that may know ASCII only."""
        try:
            text.encode(self._console.encoding)
        except UnicodeEncodeError:
            return text.translate(PLAIN).encode("ascii", "replace").decode()
        return text


class Step:
    """A step in progress: what its line will say, and what is said meanwhile on a terminal."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.text = ""
        self.mark = ""
        self.show = show


def size(count: float) -> str:
    """Bytes for people: `512 MB`, `1.24 GB` (decimal units)."""
    magnitude = abs(count)
    if magnitude >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if magnitude >= 1e6 else f"{count / 1e3:.0f} kB"
