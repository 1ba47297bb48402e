"""The `torpor` command: a group whose commands are loaded only when they are asked for.

Command NAME lives in `torpor.cli.NAME_cmd:command` (dashes as underscores). Nothing here may import what is slow.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from torpor import __version__
from torpor.cli.output import show_error
from torpor.errors import TorporError

COMMANDS: dict[str, str] = {
    "run": "Start a command as a session.",
    "adopt": "Make a session of a program that runs already.",
    "ls": "List your sessions.",
    "show": "Show all of one session.",
    "logs": "Show what a session printed.",
    "checkpoint": "Save a session and leave it running.",
    "hibernate": "Save a session, end its processes, give its memory back.",
    "resume": "Bring a hibernated session back.",
    "checkpoints": "List a session's checkpoints.",
    "verify": "Read back and authenticate what is stored.",
    "why": "Say why a session counts as busy or idle.",
    "rm": "Remove a session with its checkpoints.",
    "kernel": "Run a Jupyter kernel as a session (used by kernelspecs).",
    "jupyter": "Add Torpor to Jupyter's kernels, or take it away.",
    "up": "Run this node's agent.",
    "setup": "Install what is missing on this machine.",
    "doctor": "Say what is there, and prove that it works.",
    "demo": "See a notebook hibernate and wake, from start to end.",
}

EPILOG = """\b
Exit status: 0 done, 1 unforeseen, 2 wrong usage, 3 no such session or
checkpoint, 4 not permitted, 5 in a state that forbids it, 6 cannot be saved,
7 cannot be restored here, 8 damaged, 9 store, 10 CRIU or kernel, 11 no agent,
12 set-up. `run` in the foreground has the status of its command.

\b
Examples:
  torpor run -- python train.py
  torpor run -d --name train -- python train.py
  torpor hibernate train
  torpor resume train
"""


class LazyGroup(click.Group):
    """Knows its commands by name and one line; imports one when it runs."""

    def list_commands(self, _: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command's module; None for a name that is none."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"torpor.cli.{cmd_name.replace('-', '_')}_cmd")
        command: click.Command = module.command
        return command

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the table without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="torpor")
def group() -> None:
    """Idle sessions give their memory back, and wake with every variable where it was."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its status; an error raised on purpose is told in sentences, never as a trace."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(argv))


def run(argv: list[str]) -> int:
    """Runs one command; gives its exit status."""
    try:
        status = group.main(argv, prog_name="torpor", standalone_mode=False)
        sys.stdout.flush()
    except TorporError as error:
        show_error(error, as_json=_wants_json(argv))
        return error.exit_status
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; so does what is buffered
        return 141
    return status if isinstance(status, int) else 0


def _wants_json(argv: list[str]) -> bool:
    own = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in own
