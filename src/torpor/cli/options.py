"""Options and arguments that several commands share."""

from __future__ import annotations

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; errors as JSON on standard error.")
session_argument = click.argument("session", metavar="SESSION")
