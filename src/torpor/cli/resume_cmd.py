"""`torpor resume`."""

from __future__ import annotations

from typing import Any

import click

from torpor.cli.operation import carry_out, print_result
from torpor.cli.options import json_option, session_argument
from torpor.cli.output import clock, print_json, print_line
from torpor.client import Client
from torpor.durations import spoken_duration
from torpor.errors import Incompatible


@click.command()
@session_argument
@click.option("--dry-run", is_flag=True, help="Say whether it could come back here and with what; change nothing.")
@json_option
def command(session: str, dry_run: bool, as_json: bool) -> int:
    """Bring a hibernated session back, as it was. A session that runs already is left alone.

    A session that has ended or failed comes back from its last verified checkpoint.

    \b
    Examples:
      torpor resume train
      torpor resume train --dry-run
    """
    if dry_run:
        return _rehearse(session, as_json=as_json)
    result = carry_out(Client().operation(session, "resume"), quiet=as_json)
    print_result("resumed", session, result, as_json=as_json)
    return 0


def _rehearse(session: str, *, as_json: bool) -> int:
    found = Client().compatibility(session)
    if as_json:
        print_json(found)
    else:
        for line in _lines(session, found):
            print_line(line)
    return 0 if found["compatible"] else Incompatible.exit_status


def _lines(session: str, found: dict[str, Any]) -> list[str]:
    which = f"checkpoint {found['checkpoint']} of {clock(found['created'])}"
    if found["compatible"]:
        lines = [f"{session} can be resumed here from {which}."]
    else:
        lines = [f"{session} cannot be resumed here from {which}:"]
    lines += [f"  {sentence}" for sentence in [*found["reasons"], *found["notes"]]]
    if found["lost_seconds"]:
        lines.append(f"  What it did in the {spoken_duration(found['lost_seconds'])} after that would be lost.")
    return lines
