"""`torpor checkpoint`."""

from __future__ import annotations

import click

from torpor.cli.operation import carry_out, print_result
from torpor.cli.options import json_option, session_argument
from torpor.client import Client


@click.command()
@session_argument
@json_option
def command(session: str, as_json: bool) -> None:
    """Save a session and leave it running, its connections to the outside included.

    \b
    Examples:
      torpor checkpoint train
      torpor checkpoint train --json
    """
    result = carry_out(Client().operation(session, "checkpoint"), quiet=as_json)
    print_result("saved", session, result, as_json=as_json)
