"""When a session that ran already had to be ended, because a part of its memory could not be had."""

from __future__ import annotations

import signal
import time

from torpor.durations import spoken_duration
from torpor.engine import procfs
from torpor.engine.page_chunks import send_signal
from torpor.errors import IntegrityError
from torpor.model import Checkpoint, ProcessId, Session
from torpor.sessions.registry import Registry


def end_session(init: ProcessId) -> None:
    """Ends a session whose memory is lost, if its page source could not; returns when nothing of it runs."""
    send_signal(init.pid, init.start_time, signal.SIGKILL)
    while procfs.alive(init.pid, init.start_time, init.boot_id):
        time.sleep(0.01)


def memory_lost(registry: Registry, session: Session, damaged: Checkpoint, loss: str) -> IntegrityError:
    """Takes the checkpoint's mark away, so that the next resume goes on from an older one; the error for the owner."""
    registry.mark_verified(damaged.id, 0)
    left = [one for one in registry.checkpoints(damaged.session) if one.verified is not None]
    hint = f"None of its checkpoints is known to be whole; look at: torpor verify {session.name}"
    if left:
        older = spoken_duration(damaged.created - left[0].created)
        hint = (
            f"Resume it again to go on from its checkpoint {left[0].id}: "
            f"what the session did in the {older} after that is lost."
        )
    return IntegrityError(
        f"Session {session.name} was ended while its memory arrived from checkpoint {damaged.id}. {loss}",
        safe="It was stopped before it could use anything wrong, and every checkpoint is kept.",
        hint=hint,
    )
