"""`torpor hibernate`."""

from __future__ import annotations

import click

from torpor.cli.operation import carry_out, print_result
from torpor.cli.options import json_option, session_argument
from torpor.client import Client


@click.command()
@session_argument
@click.option("--if-idle", is_flag=True, help="Not while the kernel runs a cell or waits for input.")
@json_option
def command(session: str, if_idle: bool, as_json: bool) -> None:
    """Save a session, verify what was saved, and only then end its processes: their memory is free.

    A kernel may be in the middle of a cell, which goes on after the resume; one that speaks TCP only is refused then.
    If anything fails, the session goes on as before.

    \b
    Examples:
      torpor hibernate train
      torpor hibernate train --if-idle --json
    """
    result = carry_out(Client().operation(session, "hibernate", if_idle=if_idle), quiet=as_json)
    print_result("hibernated", session, result, as_json=as_json)
