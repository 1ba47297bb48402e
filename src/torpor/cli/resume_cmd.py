"""`torpor resume`."""

from __future__ import annotations

import click

from torpor.cli.operation import carry_out, print_result
from torpor.cli.options import json_option, session_argument
from torpor.client import Client


@click.command()
@session_argument
@json_option
def command(session: str, as_json: bool) -> None:
    """Bring a hibernated session back, as it was. A session that runs already is left alone.

    \b
    Examples:
      torpor resume train
      torpor resume train --json
    """
    result = carry_out(Client().operation(session, "resume"), quiet=as_json)
    print_result("resumed", session, result, as_json=as_json)
