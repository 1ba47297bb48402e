"""`torpor up`."""

from __future__ import annotations

import click

LEVELS = ["debug", "info", "warning", "error"]


@click.command()
@click.option("--foreground", is_flag=True, expose_value=False, help="Stay in the foreground; it always does.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
def command(log_level: str) -> int:
    """Run this node's agent, in the foreground, until SIGTERM or Ctrl-C.

    Sessions, running operations and the keeper go on without it, and it finds them again when it is started anew.
    All state is kept under TORPOR_HOME, or else in /var/lib/torpor, /run/torpor and /etc/torpor/config.toml.

    \b
    Examples:
      torpor up
      TORPOR_HOME=/srv/torpor torpor up
      systemctl enable --now torpor
    """
    from torpor.agent.serve import serve

    return serve(log_level)
