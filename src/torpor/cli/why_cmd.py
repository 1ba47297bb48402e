"""`torpor why`."""

from __future__ import annotations

import click

from torpor.cli.options import json_option, session_argument
from torpor.cli.output import print_json, print_line
from torpor.client import Client


@click.command()
@session_argument
@json_option
def command(session: str, as_json: bool) -> None:
    """Say why a session counts as busy or idle, and what would change that.

    \b
    Examples:
      torpor why train
      torpor why train --json
    """
    told = Client().why(session)
    if as_json:
        print_json(told)
        return
    print_line(" ".join(part for part in (told["sentence"], told["would_change"]) if part))
    if told["policy_problem"] is not None:
        print_line(f"The policy file is not in force: {told['policy_problem']['message']}", err=True)
