"""`torpor logs`."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator

import click

from torpor.cli.options import session_argument
from torpor.client import Client
from torpor.text import shown_lines


@click.command()
@session_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the session has ended.")
@click.option("--stderr", is_flag=True, help="Standard error of a session whose streams are apart.")
def command(session: str, follow: bool, stderr: bool) -> None:
    """Show what a session printed. Detached sessions and terminals have one log, foreground pipes have two.

    On a terminal, control characters in the output of somebody else's session are spelled out.

    \b
    Examples:
      torpor logs train
      torpor logs -f train
      torpor logs --stderr build
    """
    client = Client()
    show = _shown if sys.stdout.isatty() and client.session(session)["uid"] != os.getuid() else iter
    for piece in show(client.logs(session, "err" if stderr else "out", follow=follow)):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _shown(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Somebody else's output does not command this terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for piece in pieces:
        yield shown_lines(decoder.decode(piece)).encode()
