"""The agent as a systemd service."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from torpor.errors import SetupError

UNIT_FOLDER = Path("/etc/systemd/system")
UNIT_NAME = "torpor.service"
_PACKAGED_PROGRAM = "/usr/local/bin/torpor"


def unit(program: Path) -> str:
    """The unit file that starts the agent with this `torpor` program."""
    return resources.files(__package__).joinpath(UNIT_NAME).read_text().replace(_PACKAGED_PROGRAM, str(program))


def install_unit(program: Path, folder: Path = UNIT_FOLDER) -> Path:
    """Writes the unit file, replacing an older one at once; its path. Raises `SetupError`."""
    target = folder / UNIT_NAME
    fresh = target.with_suffix(".new")
    try:
        fresh.write_text(unit(program))
        os.replace(fresh, target)
    except OSError as error:
        raise SetupError(
            f"{target} could not be written ({error.strerror}).",
            safe="Nothing on this machine was changed.",
            hint="Run `torpor setup --systemd` as root on a machine that systemd runs, or start `torpor up` yourself.",
        ) from None
    return target
