"""`torpor show`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from torpor.cli.checkpoints_cmd import checkpoint_table
from torpor.cli.options import json_option, session_argument
from torpor.cli.output import clock, print_json, print_line, size
from torpor.client import Client
from torpor.durations import spoken_duration
from torpor.jupyter.command import without_inner_half


@click.command()
@session_argument
@json_option
def command(session: str, as_json: bool) -> None:
    """Show all of one session, named by its name or id.

    \b
    Examples:
      torpor show train
      torpor show train --json
    """
    shown = Client().session(session)
    if as_json:
        print_json(shown)
        return
    for label, value in _lines(shown):
        print_line(f"{label + ':':<15}{value}")
    if shown["checkpoints"]:
        click.echo("")
        checkpoint_table(shown["checkpoints"])


def _lines(shown: dict[str, Any]) -> list[tuple[str, str]]:
    launch, verdict, error = shown["launch"], shown["verdict"], shown["error"]
    lines = [
        ("name", shown["name"]),
        ("id", shown["id"]),
        ("state", shown["state"]),
        ("kind", shown["kind"]),
        ("owner", shown["owner"]),
        ("node", shown["node"]),
        ("command", shlex.join(without_inner_half(launch["argv"]))),
        ("directory", launch["cwd"]),
        ("created", clock(shown["created"])),
    ]
    if shown["pids"]:
        lines.append(("processes", " ".join(str(pid) for pid in shown["pids"])))
        lines.append(("memory", size(shown["rss_bytes"])))
        lines.append(("last use", f"{spoken_duration(shown['idle_seconds'])} ago"))
        lines.append(("verdict", verdict["sentence"]))
    if shown["pids"] and shown["outside"]:
        lines.append(("adopted", "it runs where it was started until its first hibernation"))
    if shown["labels"]:
        lines.append(("labels", " ".join(f"{name}={value}" for name, value in shown["labels"].items())))
    if shown["idle_after"] is not None:
        lines.append(("idle after", spoken_duration(shown["idle_after"])))
    if shown["on_failure"] is not None:
        lines.append(("on failure", shown["on_failure"]))
    if shown["ended"] is not None:
        status = shown["exit_status"]
        lines.append(("ended", f"{clock(shown['ended'])}, exit status {'unknown' if status is None else status}"))
    if shown["lost"] is not None:
        lines.append(("lost", shown["lost"]))
    lines += [("note", note) for note in shown["notes"]]
    if error is not None:
        lines.append(("last error", " ".join(error[part] for part in ("message", "safe", "hint") if error.get(part))))
    return lines
