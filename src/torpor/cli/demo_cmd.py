"""`torpor demo`: a real notebook goes to sleep and wakes, shown on this machine in about a minute."""

from __future__ import annotations

import json

import click
from rich.console import Console

from torpor.demo import story
from torpor.demo.timeline import Timeline, size
from torpor.errors import TorporError

EPILOG = """\b
Examples:
  sudo torpor demo                 the timeline, with sizes and times
  sudo torpor demo --json          the same for programs, when it is over

\b
Exit status: 0 everything was as promised; 4 not root; 12 something is missing here;
1 (or that of the error) when the notebook was not hibernated, did not wake, or computed something else.
"""


@click.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print the timeline and the figures as JSON at the end.")
def command(as_json: bool) -> None:
    """Show it for real: a notebook in JupyterLab trains a model, falls idle, is hibernated, and goes on training.

    Needs root, JupyterLab and no GPU. An agent of its own is started in a temporary folder; the losses after waking
    are compared bit for bit with those of an uninterrupted run. Nothing that it starts is left behind.
    """
    timeline = Timeline(Console(), quiet=as_json)
    figures = story.Figures()
    timeline.heading("A notebook goes to sleep and wakes")
    try:
        story.tell(timeline, figures)
    except TorporError as failure:
        if not as_json:
            timeline.note("✗", "failed", failure.message)
            raise
        _print(timeline, figures, failure)
        click.get_current_context().exit(failure.exit_status)
    if as_json:
        _print(timeline, figures, None)
    else:
        given, awake = size(figures.bytes_resident), figures.seconds_first_output
        timeline.heading(f"{given} given back while it slept; answered {awake:.2f} s after the next cell; no bit lost.")


def _print(timeline: Timeline, figures: story.Figures, failure: TorporError | None) -> None:
    report = {
        "ok": failure is None,
        "error": None if failure is None else failure.as_dict(),
        "timeline": timeline.as_data(),
        "figures": figures.as_data(),
    }
    click.echo(json.dumps(report, indent=2))
