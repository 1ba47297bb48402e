"""How much of what all users share one of them may take. Root is not counted."""

from __future__ import annotations

from collections.abc import Sequence

from torpor.errors import Conflict
from torpor.model import Launch, Session

SESSIONS_PER_USER = 500  # also those that have ended and are not removed
LAUNCH_BYTES_PER_USER = 16 << 20  # of the commands and environments of all of them


def check(own: Sequence[Session], launch: Launch) -> None:
    """Raises Conflict when a user who has `own` sessions may not have this one, too."""
    hint = "Remove some that are not needed any more: torpor rm"
    if len(own) >= SESSIONS_PER_USER:
        raise Conflict(f"You have {len(own)} sessions; a user may have {SESSIONS_PER_USER}.", hint=hint)
    if sum(size_of(session.launch) for session in own) + size_of(launch) > LAUNCH_BYTES_PER_USER:
        raise Conflict(
            f"The commands and environments of your sessions would be larger than {LAUNCH_BYTES_PER_USER >> 20} MiB.",
            hint=hint,
        )


def size_of(launch: Launch) -> int:
    """Characters of a command and its environment."""
    return sum(map(len, launch.argv)) + sum(len(name) + len(value) for name, value in launch.env.items())
