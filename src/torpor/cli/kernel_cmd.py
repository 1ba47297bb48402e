"""`torpor kernel`: what a kernelspec's command names in the kernel's place."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from torpor.client import Client
from torpor.durations import parse_duration

EPILOG = """\b
Examples:
  torpor kernel -f kernel.json -- python -m ipykernel_launcher -f {connection_file}
  torpor kernel -f kernel.json --idle-after 10m -- R --slave -e 'IRkernel::main()' --args {connection_file}

\b
Exit status: the kernel's own; 143 after SIGTERM; 2 for a bad connection file or command, 11 when no agent answers.
"""


@click.command("kernel", epilog=EPILOG)
@click.option(
    "-f",
    "connection_file",
    type=click.Path(path_type=Path),
    required=True,
    help="The connection file that Jupyter wrote.",
)
@click.option("--name", help="The session's name (default: made up).")
@click.option("--idle-after", metavar="T", help="Idle this long, then hibernate: 90s, 30m, 2h.")
@click.option(
    "--transport",
    type=click.Choice(["auto", "ipc", "tcp"]),
    default="auto",
    show_default=True,
    help="How the kernel is spoken to. With ipc it can be saved in the middle of a cell; tcp is for kernels that know "
    "nothing else, and saves them at quiet moments only. auto: ipc, and tcp if the kernel ends before it answers.",
)
@click.argument("argv", metavar="-- CMD...", nargs=-1, type=click.UNPROCESSED, required=True)
def command(
    connection_file: Path, name: str | None, idle_after: str | None, transport: str, argv: tuple[str, ...]
) -> None:
    """Be the Jupyter kernel of a connection file, while the real one may sleep.

    CMD starts the real kernel; {connection_file} in it, or the path given with -f, becomes the path of an inner
    connection file. Jupyter's clients talk to this process, which stays when the kernel is away and wakes it for the
    next cell. `torpor jupyter install` puts this command into a kernelspec.
    """
    from torpor.jupyter.serve import Sessions, serve_kernel

    logging.basicConfig(format="torpor kernel: %(message)s", level=logging.WARNING)
    sessions = Sessions(Client(), name=name, idle_after=parse_duration(idle_after) if idle_after else None)
    sys.exit(serve_kernel(connection_file, argv, sessions, transport=transport))
