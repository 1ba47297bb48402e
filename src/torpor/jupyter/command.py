"""The words of `torpor kernel` as kernelspecs and the provisioner write them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def relay_command() -> list[str]:
    """How this very installation of Torpor is started, whatever the PATH says later."""
    script = Path(sys.executable).with_name("torpor")
    return [str(script)] if script.exists() else [sys.executable, "-m", "torpor"]


def wrapped(argv: Sequence[str], connection_file: str = "{connection_file}") -> list[str]:
    """The kernel's command inside the relay's."""
    return [*relay_command(), "kernel", "-f", connection_file, "--", *argv]


def is_wrapped(argv: Sequence[str]) -> bool:
    """Whether this command is a relay's, of this or of another installation."""
    if "--" not in argv:
        return False
    front = list(argv[: argv.index("--")])
    if "kernel" not in front:
        return False
    start = front[: front.index("kernel")]
    return bool(start) and (Path(start[0]).name == "torpor" or start[1:3] == ["-m", "torpor"])
