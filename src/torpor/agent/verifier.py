"""`python -m torpor.agent.verifier CHECKPOINT`: reads and authenticates every byte of one checkpoint.

Prints lines of JSON: progress events, then a result or an error event. A damaged checkpoint loses its mark.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from torpor.agent.folders import site_key
from torpor.errors import IntegrityError, TorporError
from torpor.paths import from_environment
from torpor.sessions.registry import Registry
from torpor.store import Store

PROGRESS_INTERVAL = 0.1  # seconds


def main(checkpoint_id: str) -> int:
    """Verifies one checkpoint; the exit status is that of the error."""
    paths = from_environment()
    try:
        registry = Registry(paths.database)
        checkpoint = registry.checkpoint(checkpoint_id)
        with Store.open(paths.store, site_key(paths)) as store:
            try:
                store.verify(store.manifest(checkpoint.session, checkpoint.id), _Progress(checkpoint_id).report)
            except IntegrityError:
                registry.mark_verified(checkpoint.id, 0)
                raise
        _tell({"event": "result", "verified": registry.mark_verified(checkpoint.id).verified})
    except TorporError as error:
        _tell({"event": "error", "error": error.as_dict()})
        return error.exit_status
    return 0


class _Progress:
    def __init__(self, checkpoint_id: str) -> None:
        self._phase = f"verify {checkpoint_id}"
        self._next = 0.0

    def report(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_INTERVAL
            _tell({"event": "progress", "phase": self._phase, "done": done, "total": total})


def _tell(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
