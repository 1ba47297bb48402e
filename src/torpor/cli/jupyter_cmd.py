"""`torpor jupyter`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from torpor.cli.options import json_option
from torpor.cli.output import print_json
from torpor.errors import UsageError

SENTENCES = {
    "added": "{kernel}: runs under Torpor from now on ({folder})",
    "copied": "{kernel}: copied to {folder}, and runs under Torpor from now on",
    "shadowed": "{kernel}: copied to {folder}; but this environment's Jupyter finds another one first, and uses that",
    "unchanged": "{kernel}: already runs under Torpor ({folder})",
    "restored": "{kernel}: as it was before ({folder})",
    "removed": "{kernel}: the copy in {folder} is removed",
}


@click.group("jupyter")
def command() -> None:
    """Add Torpor to Jupyter's kernels, or take it away."""


@command.command("install")
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="A kernelspec; again for more [python3].")
@click.option("--all", "every", is_flag=True, help="Every kernelspec that Jupyter finds here.")
@click.option("--user", is_flag=True, help="Into this user's kernelspecs.")
@click.option("--sys-prefix", is_flag=True, help="Into this Python environment's kernelspecs.")
@click.option("--prefix", type=click.Path(path_type=Path), help="Into PREFIX/share/jupyter/kernels.")
@click.option("--undo", is_flag=True, help="Take it away again; without --kernel from all kernelspecs that have it.")
@json_option
def install_command(
    kernels: tuple[str, ...],
    every: bool,
    user: bool,
    sys_prefix: bool,
    prefix: Path | None,
    undo: bool,
    as_json: bool,
) -> None:
    """Let kernels run as sessions that hibernate when idle. No notebook changes.

    The kernelspec's command is wrapped in `torpor kernel`, in place where it may be written, else in a copy among this
    user's kernelspecs. Kernels that already run go on as they are; it holds for those started from now on.

    \b
    Examples:
      torpor jupyter install
      torpor jupyter install --kernel ir --kernel python3
      torpor jupyter install --all --sys-prefix
      torpor jupyter install --undo
    """
    from torpor.jupyter import install

    if user + sys_prefix + (prefix is not None) > 1:
        raise UsageError("Choose one of --user, --sys-prefix and --prefix.")
    if every and kernels:
        raise UsageError("Choose --all or --kernel.")
    destination = install.user_kernels() if user else install.prefix_kernels(Path(sys.prefix)) if sys_prefix else None
    destination = install.prefix_kernels(prefix) if prefix else destination
    if undo:
        changes = install.undo(kernels or None, destination)
    else:
        names = install.kernel_names() if every else kernels or (install.NATIVE,)
        changes = install.install(names, destination)
    if as_json:
        print_json([{"kernel": c.kernel, "folder": str(c.folder), "done": c.done} for c in changes])
        return
    for change in changes:
        click.echo(SENTENCES[change.done].format(kernel=change.kernel, folder=change.folder))
    if not changes:
        click.echo("No kernelspec runs under Torpor.")
