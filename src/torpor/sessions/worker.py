"""One process per transition: `python -m torpor.sessions.worker OPERATION`.

It outlives the agent, writes its own journal, and prints progress as JSON lines. Its exit status is 0 when the
operation is completed, 1 when it was undone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from torpor import logs
from torpor import paths as places
from torpor.engine import private_mounts, procfs
from torpor.engine.criu_binary import require_criu
from torpor.engine.launcher import join_fresh_keyring
from torpor.errors import TorporError
from torpor.model import Operation, OperationKind, ProcessId
from torpor.paths import Paths
from torpor.sessions.executor import Context, Transition, execute, prepare_pause
from torpor.sessions.registry import Registry
from torpor.sessions.resuming import Resuming
from torpor.sessions.saving import Saving
from torpor.store import Store

PROGRESS_INTERVAL = 0.1  # seconds between two lines of one phase


def main(operation_id: str) -> int:
    """Carries out one operation of the registry that `TORPOR_HOME` names. Raises nothing that is on record."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    logs.configure("warning")
    prepare_pause()
    os.umask(0o077)
    private_mounts.enter()
    join_fresh_keyring()  # what CRIU restores inherits it
    paths = places.from_environment()
    registry = Registry(paths.database)
    registry.note_worker(operation_id, ProcessId(*procfs.identify(os.getpid()), procfs.boot_id()))
    operation = registry.operation(operation_id)
    scratch = _scratch(paths.scratch)
    with contextlib.ExitStack() as held:
        return _work(held, paths, registry, operation, scratch)


def _work(held: contextlib.ExitStack, paths: Paths, registry: Registry, operation: Operation, scratch: Path) -> int:
    resuming = operation.kind is OperationKind.RESUME
    try:
        store = held.enter_context(Store.open(paths.store, paths.site_key.read_bytes()))
        if resuming:
            held.enter_context(store.reading())
        context = Context(
            paths=paths,
            registry=registry,
            store=store,
            criu=require_criu(paths),
            operation=operation,
            session=registry.session(operation.session),
            scratch=scratch,
            progress=_Reporter().report,
        )
        transition: Transition = Resuming(context) if resuming else Saving(context)
    except TorporError as refused:
        registry.finish_operation(operation.id, "undone", operation.before, error=refused.as_dict())
        return 1
    try:
        execute(context, transition)
    except TorporError:
        return 1
    return 0


class _Reporter:
    """Prints progress for whoever reads it; nobody has to."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = ("", 0.0)

    def report(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase == self._last[0] and now - self._last[1] < PROGRESS_INTERVAL:
            return
        self._last = (phase, now)
        line = msgspec.json.encode({"event": "progress", "phase": phase, "done": done, "total": total}) + b"\n"
        with contextlib.suppress(OSError):
            os.write(1, line)


def _scratch(folder: Path) -> Path:
    """The folder with memory mounted on it that nobody else sees and that vanishes with this process."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private_mounts.tmpfs(folder, options="mode=0700,size=100%")
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
