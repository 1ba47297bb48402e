"""`torpor doctor`: says what this machine has, and what the rest costs."""

from __future__ import annotations

import click
import msgspec

from torpor.errors import SetupError
from torpor.paths import from_environment
from torpor.setup import doctor

EPILOG = """\b
Examples:
  sudo torpor doctor               everything, with CRIU proved at work
  torpor doctor --json             the same for programs

\b
Exit status: 0 nothing essential is missing; 12 something is.
"""


@click.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(as_json: bool) -> None:
    """Examine this machine: what is there, what a missing thing costs, and how to get it.

    CRIU is proved by saving and restoring a small process. Nothing is changed, and nothing is left behind.
    """
    report = doctor.examine(from_environment())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        click.echo(f"Torpor {report.torpor} on {report.node}")
        for check in report.checks:
            say(check)
    if not report.ok:
        click.get_current_context().exit(SetupError.exit_status)


def say(check: doctor.Check) -> None:
    """Prints one check: a mark, what was found, and, when something is missing, its cost and its remedy."""
    mark, colour = ("ok", "green") if check.ok else ("missing", "red") if check.essential else ("without", "yellow")
    click.echo(f"{click.style(f'{mark:>8}', fg=colour)}  {check.name}: {check.found}")
    for sentence in (check.cost, check.remedy):
        if sentence:
            click.echo(f"{'':8}  {sentence}")
