"""`torpor logs`."""

from __future__ import annotations

import sys

import click

from torpor.cli.options import session_argument
from torpor.client import Client


@click.command()
@session_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the session has ended.")
@click.option("--stderr", is_flag=True, help="Standard error of a session whose streams are apart.")
def command(session: str, follow: bool, stderr: bool) -> None:
    """Show what a session printed. Detached sessions and terminals have one log, foreground pipes have two.

    \b
    Examples:
      torpor logs train
      torpor logs -f train
      torpor logs --stderr build
    """
    for piece in Client().logs(session, "err" if stderr else "out", follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
