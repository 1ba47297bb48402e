"""`torpor hibernate`."""

from __future__ import annotations

import click

from torpor.cli.operation import carry_out, print_result
from torpor.cli.options import json_option, session_argument
from torpor.client import Client


@click.command()
@session_argument
@json_option
def command(session: str, as_json: bool) -> None:
    """Save a session, verify what was saved, and only then end its processes: their memory is free.

    A kernel that runs a cell is not hibernated. If anything fails, the session goes on as before.

    \b
    Examples:
      torpor hibernate train
      torpor hibernate train --json
    """
    result = carry_out(Client().operation(session, "hibernate"), quiet=as_json)
    print_result("hibernated", session, result, as_json=as_json)
