"""`torpor ls`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from torpor.cli.options import json_option
from torpor.cli.output import print_json, size, table
from torpor.client import Client
from torpor.durations import spoken_duration
from torpor.jupyter.command import without_inner_half
from torpor.text import shown

COMMAND_WIDTH = 40


@click.command()
@json_option
def command(as_json: bool) -> None:
    """List your sessions (as root: everybody's), oldest first.

    \b
    Examples:
      torpor ls
      torpor ls --json
    """
    sessions = Client().sessions()
    if as_json:
        print_json(sessions)
        return
    owners = len({session["owner"] for session in sessions}) > 1
    heads = ["NAME", "ID", "STATE", "IDLE", "MEMORY", "CHECKPOINTS", *(["OWNER"] if owners else []), "COMMAND"]
    table(heads, [_row(session, owners) for session in sessions])


def _row(session: dict[str, Any], owners: bool) -> list[str]:
    line = shown(shlex.join(without_inner_half(session["launch"]["argv"])))
    return [
        session["name"],
        session["id"],
        _state(session),
        spoken_duration(session["idle_seconds"]) if session["pids"] else "-",
        size(session["rss_bytes"]) if session["pids"] else "-",
        str(len(session["checkpoints"])),
        *([session["owner"]] if owners else []),
        line if len(line) <= COMMAND_WIDTH else line[: COMMAND_WIDTH - 1] + "…",
    ]


def _state(session: dict[str, Any]) -> str:
    status = session["exit_status"]
    return f"{session['state']} ({status})" if status is not None else str(session["state"])
