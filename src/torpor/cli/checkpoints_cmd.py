"""`torpor checkpoints`."""

from __future__ import annotations

from typing import Any

import click

from torpor.cli.options import json_option, session_argument
from torpor.cli.output import clock, print_json, size, table
from torpor.client import Client


@click.command()
@session_argument
@json_option
def command(session: str, as_json: bool) -> None:
    """List a session's checkpoints, newest first.

    \b
    Examples:
      torpor checkpoints train
      torpor checkpoints train --json
    """
    found = Client().checkpoints(session)
    if as_json:
        print_json(found)
    else:
        checkpoint_table(found)


def checkpoint_table(found: list[dict[str, Any]]) -> None:
    """Checkpoints with their sizes: all of the memory, what it takes in the store, what was new of it."""
    heads = ["CHECKPOINT", "CREATED", "MADE BY", "MEMORY", "STORED", "NEW", "VERIFIED"]
    rows = [
        [
            one["id"],
            clock(one["created"]),
            one["kind"],
            size(one["bytes_logical"]),
            size(one["bytes_stored"]),
            size(one["bytes_new"]),
            clock(one["verified"]),
        ]
        for one in found
    ]
    table(heads, rows)
