"""The words of `torpor kernel` as kernelspecs and the provisioner write them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2]  # the folder that holds the package
INNER = "import sys; sys.path.append({source!r}); from torpor.jupyter.inner import main; main()"


def relay_command() -> list[str]:
    """How this very installation of Torpor is started, whatever the PATH says later."""
    script = Path(sys.executable).with_name("torpor")
    return [str(script)] if script.exists() else [sys.executable, "-m", "torpor"]


def wrapped(
    argv: Sequence[str], connection_file: str = "{connection_file}", *, metadata: Mapping[str, Any] | None = None
) -> list[str]:
    """The kernel's command inside the relay's. `metadata` is the kernelspec's: `torpor.transport` is "ipc" or "tcp"."""
    transport = ((metadata or {}).get("torpor") or {}).get("transport")
    flags = ["--transport", str(transport)] if transport else []
    return [*relay_command(), "kernel", "-f", connection_file, *flags, "--", *argv]


def with_inner_half(argv: Sequence[str], settings: Path) -> list[str]:
    """The kernel's command below an inner half, which is run by the system's Python where there is one."""
    system = Path("/usr/bin/python3")
    python = str(system) if os.access(system, os.X_OK) else sys.executable
    return [python, "-ISBc", INNER.format(source=str(SOURCE)), str(settings), "--", *argv]


def without_inner_half(argv: Sequence[str]) -> list[str]:
    """The command of a session as people know it: a kernel's without its inner half."""
    if argv[1:3] == ["-ISBc", INNER.format(source=str(SOURCE))]:
        return list(argv[5:])
    return list(argv)


def is_wrapped(argv: Sequence[str]) -> bool:
    """Whether this command is a relay's, of this or of another installation."""
    if "--" not in argv:
        return False
    front = list(argv[: argv.index("--")])
    if "kernel" not in front:
        return False
    start = front[: front.index("kernel")]
    return bool(start) and (Path(start[0]).name == "torpor" or start[1:3] == ["-m", "torpor"])
