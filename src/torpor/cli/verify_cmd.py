"""`torpor verify`."""

from __future__ import annotations

import click

from torpor.cli.operation import carry_out
from torpor.cli.options import json_option
from torpor.cli.output import print_json
from torpor.client import Client


@click.command()
@click.argument("ref", metavar="SESSION|CHECKPOINT")
@json_option
def command(ref: str, as_json: bool) -> None:
    """Read every stored byte of a session's checkpoints, or of one checkpoint, and authenticate it.

    Exit status 8 when something is damaged; the error names it.

    \b
    Examples:
      torpor verify train
      torpor verify train --json
    """
    result = carry_out(Client().verify(ref), quiet=as_json)
    if as_json:
        print_json(result)
        return
    whole = [f"{checkpoint} is whole." for checkpoint in result["checkpoints"]]
    click.echo("\n".join(whole) or "There is no checkpoint to verify.")
