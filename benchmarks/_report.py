"""What all benchmarks share: options, interleaved rounds, medians, and the machine's facts beside every figure."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

GIB = 1 << 30
SHOWN = 10  # samples of a figure in the table; JSON has all of them

Sample = Mapping[str, float]


@dataclass
class Report:
    """Raw samples by contender and figure, in the order in which they were taken."""

    title: str
    raw: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    def add(self, who: str, sample: Sample) -> None:
        """Adds one run's figures."""
        for name, value in sample.items():
            self.raw.setdefault(f"{who}: {name}", []).append(round(value, 5))

    def median(self, name: str) -> float:
        """The median of one figure, e.g. `torpor: seconds`."""
        return median(self.raw[name])

    def ratio(self, name: str, ours: str, theirs: str) -> None:
        """Notes the ratio of two medians."""
        self.ratios[name] = round(self.median(ours) / self.median(theirs), 4)

    def print(self, *, as_json: bool) -> None:
        """Prints medians, ratios, raw numbers and the machine."""
        facts = machine()
        if as_json:
            medians = {name: median(values) for name, values in self.raw.items()}
            print(
                json.dumps(
                    {"benchmark": self.title, "ratios": self.ratios, "medians": medians}
                    | {"raw": self.raw, "machine": facts}
                )
            )
            return
        print(f"\n{self.title}\n")
        width = max(map(len, [*self.raw, *self.ratios]))
        for name, value in self.ratios.items():
            print(f"  {name:{width}}  {value:10.3f}  (ratio of medians)")
        print()
        for name, values in self.raw.items():
            shown = values if len(values) <= SHOWN else sorted(values)[:: len(values) // (SHOWN - 1)]
            samples = " ".join(f"{value:.4g}" for value in shown)
            kind = "" if shown is values else f"{len(values)}, from the least to the most: "
            print(f"  {name:{width}}  {median(values):10.4g}  median of {kind}{samples}")
        print("\n  machine: " + ", ".join(f"{name} {value}" for name, value in facts.items()))


def options(description: str, **defaults: float) -> argparse.Namespace:
    """Command-line options: `--json`, and one for each default, of its type. SIGTERM cleans up from here on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    return parser.parse_args()


def interleave(rounds: int, report: Report, *contenders: tuple[str, Callable[[], Sample]]) -> None:
    """Every contender once a round, in turns the other way round, so that drift and order hit all alike."""
    for number in range(rounds):
        for who, run in contenders if number % 2 == 0 else reversed(contenders):
            if rounds <= SHOWN:
                print(f"round {number + 1} of {rounds}: {who}", file=sys.stderr, flush=True)
            report.add(who, run())


def machine() -> dict[str, str]:
    """What the figures depend on."""
    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "cores": str(os.cpu_count()),
        "processor": processor.group(1) if processor else platform.machine(),
        "memory": f"{int(memory.group(1)) >> 20} GiB" if memory else "unknown",
        "kernel": platform.release(),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
    }
