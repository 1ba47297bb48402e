"""`torpor rm`."""

from __future__ import annotations

import click

from torpor.cli.options import json_option
from torpor.cli.output import print_json, print_line, size
from torpor.client import Client


@click.command()
@click.argument("sessions", metavar="SESSION...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also a live session: it is ended first.")
@json_option
def command(sessions: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Remove sessions with their checkpoints and logs. What they held is gone then.

    \b
    Examples:
      torpor rm train
      torpor rm --force train
    """
    client = Client()
    removed = [client.remove(session, force=force) for session in sessions]
    if as_json:
        print_json(removed)
        return
    for one in removed:
        print_line(f"{one['name']} removed, {size(one['bytes_freed'])} freed in the store.")
