"""`torpor run`."""

from __future__ import annotations

import os
import sys

import click

from torpor.cli.options import json_option, pairs
from torpor.cli.output import print_json
from torpor.client import Client
from torpor.durations import parse_duration
from torpor.errors import UsageError


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.option("-d", "--detach", is_flag=True, help="Return at once, and print the session's name.")
@click.option("--name", help="Name of the session; made from the command otherwise.")
@click.option("--cwd", type=click.Path(), help="Working directory; the present one otherwise.")
@click.option("--env", "variables", multiple=True, metavar="K=V", help="Set a variable, beside those set here.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Label the session.")
@click.option("--idle-after", metavar="T", help="Hibernate it after this much idleness: 90s, 30m, 2h.")
@click.option(
    "--on-failure",
    type=click.Choice(["resume", "none"]),
    help="When it fails: go on from its last checkpoint by itself, or not; otherwise as the policy says.",
)
@json_option
@click.argument("argv", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    detach: bool,
    name: str | None,
    cwd: str | None,
    variables: tuple[str, ...],
    labels: tuple[str, ...],
    idle_after: str | None,
    on_failure: str | None,
    as_json: bool,
    argv: tuple[str, ...],
) -> int:
    """Start a command as a session, as yourself, with your groups, limits, umask and environment.

    In the foreground it behaves like the command itself: output, signals, terminal; the exit status is the
    command's (128 + N when signal N ended it, 127 when it was not found, 126 when it could not be executed).

    \b
    Examples:
      torpor run -- python train.py
      torpor run -d --name train --idle-after 1h -- python train.py
      torpor run --env OMP_NUM_THREADS=4 --label team=vision -- ./sweep.sh
    """
    if as_json and not detach:
        raise UsageError("--json goes with -d: in the foreground the output is the command's.")
    terminal = not detach and sys.stdin.isatty() and sys.stdout.isatty()
    columns, rows = os.get_terminal_size(sys.stdout.fileno()) if terminal else (80, 24)
    client = Client()
    session = client.create_session(
        list(argv),
        cwd=os.path.abspath(cwd) if cwd else os.getcwd(),
        env={**os.environ, **pairs("--env", variables)},
        io="terminal" if terminal else "detached" if detach else "streams",
        name=name,
        rows=max(rows, 1),
        columns=max(columns, 1),
        labels=pairs("--label", labels),
        idle_after=parse_duration(idle_after) if idle_after else None,
        on_failure=on_failure,
    )
    if detach:
        print_json(session) if as_json else click.echo(session["name"])
        return 0
    if terminal:
        from torpor.cli.foreground_terminal import stay

        return stay(client, session)
    from torpor.cli.foreground_streams import stay as stay_with_streams

    return stay_with_streams(client, session)
