"""`torpor setup`: brings what Torpor needs onto this machine, or only says whether it is there."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from torpor.cli.doctor_cmd import say
from torpor.errors import SetupError
from torpor.paths import from_environment
from torpor.setup import doctor, provision, systemd

EPILOG = """\b
Examples:
  sudo torpor setup                find a CRIU that works, else unpack one
  sudo torpor setup --check        prove what is there, change nothing
  sudo torpor setup --systemd      install the agent as a service, too

\b
Exit status: 0 a CRIU works; 12 none does, or it could not be fetched.
"""


@click.command(epilog=EPILOG)
@click.option("--check", is_flag=True, help="Change nothing: only say what is there, and prove it.")
@click.option("--systemd", "service", is_flag=True, help="Also write the systemd unit of the agent.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(check: bool, service: bool, as_json: bool) -> None:
    """Find a CRIU that works on this machine, or bring one.

    The system's own CRIU is used when it is 4.2 or newer. Else Debian's package and its libraries are unpacked into
    Torpor's own folder: nothing is installed, upgraded or pinned. Either is proved by saving and restoring a small
    process.
    """
    paths = from_environment()
    if not check:
        provision.ensure_criu(paths, lambda sentence: click.echo(f"{sentence} …", err=True))
        if service:
            unit = systemd.install_unit(Path(sys.argv[0]).absolute())
            click.echo(f"Wrote {unit}. Start the agent: systemctl enable --now torpor", err=True)
    criu, checks = doctor.examine_criu(paths)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"criu": criu, "checks": checks})).decode())
    else:
        for each in checks:
            say(each)
    if not all(each.ok for each in checks if each.essential):
        click.get_current_context().exit(SetupError.exit_status)
