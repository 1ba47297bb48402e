"""Options and arguments that several commands share."""

from __future__ import annotations

import click

from torpor.errors import UsageError

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; errors as JSON on standard error.")
session_argument = click.argument("session", metavar="SESSION")


def pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    """The values K=V of an option that may be repeated. Raises UsageError for one of another form."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {text!r} is not of the form K=V.")
        found[name] = value
    return found
