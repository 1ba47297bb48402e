"""`torpor adopt`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from torpor.cli.options import json_option, pairs
from torpor.cli.output import print_json, size
from torpor.client import Client
from torpor.durations import parse_duration
from torpor.errors import PreflightRefused


@click.command()
@click.argument("pid", metavar="PID", type=click.IntRange(min=1))
@click.option("--name", help="Name of the session; made from the command otherwise.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="Label the session.")
@click.option("--idle-after", metavar="T", help="Hibernate it after this much idleness: 90s, 30m, 2h.")
@click.option("--dry-run", is_flag=True, help="Only say what would be adopted, and all that stands against it.")
@json_option
def command(
    pid: int, name: str | None, labels: tuple[str, ...], idle_after: str | None, dry_run: bool, as_json: bool
) -> int:
    """Make a session of a program that runs already: of process PID and everything below it.

    It runs on where it was started; what it shares with other programs (a terminal, a pipe, a connection) is
    named, and refused, before anything is touched. After its first hibernation it comes back in namespaces of
    its own, with the same process numbers inside.

    A notebook: adopt the whole Jupyter server. A program in a terminal: run it in tmux, detach, and adopt the
    tmux server. Exit status of --dry-run: 0 nothing stands against it, 6 something does.

    \b
    Examples:
      torpor adopt 4711 --dry-run
      torpor adopt 4711 --name train
      torpor adopt $(tmux display -p '#{pid}') --name work
      torpor adopt $(pgrep -u $USER -f jupyter-lab) --name lab --json
    """
    client = Client()
    if dry_run:
        return _show(client.look_at(pid), as_json=as_json)
    session = client.adopt(
        pid,
        name=name,
        labels=pairs("--label", labels),
        idle_after=parse_duration(idle_after) if idle_after else None,
    )
    print_json(session) if as_json else click.echo(session["name"])
    return 0


def _show(found: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_json(found)
    else:
        click.echo(f"{shlex.join(found['argv'])} in {found['cwd']}, of {found['owner']}")
        click.echo(f"processes {' '.join(map(str, found['pids']))}, {size(found['rss_bytes'])}")
        for objection in found["objections"]:
            click.echo(f"- {objection}")
        click.echo("It cannot be adopted as it is." if found["objections"] else "Nothing stands against adopting it.")
    return PreflightRefused.exit_status if found["objections"] else 0
