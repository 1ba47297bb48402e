"""After a worker died in the middle: find out what is left, end what must not stay, and put it on record."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import time
from typing import Any

from torpor.engine import keeper_client, procfs, trees, yards
from torpor.engine.page_source import Report, wait_for_report
from torpor.errors import Conflict, IntegrityError, NotFound, StoreError
from torpor.model import Checkpoint, Operation, OperationKind, ProcessId, Session, State
from torpor.paths import Paths
from torpor.sessions import compatibility, planner
from torpor.sessions.executor import tell_keeper
from torpor.sessions.losses import end_session, memory_lost
from torpor.sessions.planner import Outcome, Remains
from torpor.sessions.registry import Registry
from torpor.sessions.saving import result_of
from torpor.store import Manifest, Store

PATIENCE = 15.0  # seconds CRIU gets to undo its work by itself once nobody answers its question


def recover(paths: Paths, registry: Registry, operation_id: str) -> Session:
    """Brings an operation whose worker is gone to its end; returns the session as it is then.

    May be called again after any interruption. Raises Conflict when the operation has ended already.
    """
    operation = registry.operation(operation_id)
    session = registry.session(operation.session)
    resuming = operation.kind is OperationKind.RESUME
    _settle(operation, end_at_once=resuming and "restore" not in operation.done)
    report = _all_arrived(paths, registry, operation, session) if resuming else None
    with Store.open(paths.store, paths.site_key.read_bytes()) as store:
        concluded = _conclude(paths, registry, store, operation, session, report)
    paths.page_source(operation_id).unlink(missing_ok=True)
    return concluded


def _all_arrived(paths: Paths, registry: Registry, operation: Operation, session: Session) -> Report:
    """Waits until the session's memory is there, or lost; meanwhile it runs."""
    init = session.init
    if "restore" in operation.done and init is not None and _alive(init):
        registry.update_session(session.id, state=State.RUNNING)
        _adopt(paths, session)
    report = wait_for_report(paths.page_source(operation.id))
    if report.lost and init is not None:
        end_session(init)
    return report


def _conclude(
    paths: Paths, registry: Registry, store: Store, operation: Operation, session: Session, report: Report | None
) -> Session:
    manifest = None if operation.kind is OperationKind.RESUME else _manifest(store, operation)
    remains = Remains(
        init_alive=session.init is not None and _alive(session.init),
        committed=manifest is not None,
        verified=manifest is not None and "verify" not in operation.done and _whole(store, manifest),
        memory_lost=report is not None and report.lost,
    )
    outcome = planner.outcome(operation.kind, operation.done, remains)
    with contextlib.suppress(Conflict):  # another worker uses the store; what is left goes with the next collection
        store.sweep()
    if outcome is Outcome.LOST and operation.checkpoint is not None and report is not None:
        lost = memory_lost(registry, session, registry.checkpoint(operation.checkpoint), report.loss)
        now = time.time()
        ended: dict[str, Any] = {"init": None, "ended": now, "died": now}
        return registry.finish_operation(operation.id, "undone", State.FAILED, error=lost.as_dict(), **ended)
    return _finish(paths, registry, store, operation, session, manifest, outcome)


def _settle(operation: Operation, *, end_at_once: bool) -> None:
    """Waits until CRIU has undone its work and ended, or ends it (and, for a resume, what it restored)."""
    for process in operation.processes:
        if not procfs.alive(process.pid, process.start_time, process.boot_id):
            continue
        is_criu = process == operation.processes[0]
        if end_at_once or (is_criu and not _ends(process, PATIENCE)):
            trees.end(process.pid)
            _ends(process, PATIENCE)
    if operation.kind is OperationKind.RESUME:
        yards.remove_abandoned()


def _finish(
    paths: Paths,
    registry: Registry,
    store: Store,
    operation: Operation,
    session: Session,
    manifest: Manifest | None,
    outcome: Outcome,
) -> Session:
    error = {
        "code": "engine",
        "message": f"The {operation.kind} of session {session.name} was interrupted: its worker ended.",
        "safe": f"The session is {outcome}.",
        "hint": "",
    }
    finish = registry.finish_operation
    checkpoint = _record(registry, operation, manifest) if manifest is not None and outcome in KEEPS else None
    result = result_of(checkpoint) if checkpoint else None
    match outcome:
        case Outcome.RUNNING_UNDONE:
            if manifest is not None:
                store.delete(manifest.session, manifest.checkpoint)
            if operation.checkpoint is not None:
                shutil.rmtree(compatibility.pins(paths, session.id, operation.checkpoint), ignore_errors=True)
            _adopt(paths, session)
            return finish(operation.id, "undone", State.RUNNING, error=error)
        case Outcome.RUNNING_COMPLETED:
            _adopt(paths, session)
            if operation.kind is OperationKind.RESUME:
                result = {"id": operation.checkpoint, "session": session.id}
            return finish(operation.id, "completed", State.RUNNING, result=result)
        case Outcome.HIBERNATED_COMPLETED:
            for process in operation.processes:  # of an adopted tree more than the first may be left
                procfs.kill(process)
            return finish(operation.id, "completed", State.HIBERNATED, result=result, init=None)
        case Outcome.AWAY_UNDONE:
            return finish(operation.id, "undone", operation.before, error=error, init=None)
        case Outcome.DIED | Outcome.LOST:
            now = time.time()
            status = keeper_client.exit_status(paths.session(session.id))
            state = State.ENDED if status == 0 else State.FAILED
            return finish(
                operation.id, "undone", state, error=error, exit_status=status, init=None, ended=now, died=now
            )


KEEPS = frozenset({Outcome.RUNNING_COMPLETED, Outcome.HIBERNATED_COMPLETED, Outcome.DIED})


def _record(registry: Registry, operation: Operation, manifest: Manifest) -> Checkpoint:
    """The checkpoint that a dead worker had made, on record (the worker may have recorded it itself)."""
    try:
        return registry.checkpoint(manifest.checkpoint)
    except NotFound:
        logical = sum(found.size for found in manifest.objects.values())
        checkpoint = Checkpoint(
            id=manifest.checkpoint,
            session=manifest.session,
            kind=operation.kind,
            created=manifest.created,
            parent=manifest.parent,
            bytes_logical=logical,
            bytes_stored=logical,
            bytes_new=0,
            seconds=manifest.record.get("seconds", {}),
            verified=time.time(),
        )
        registry.add_checkpoint(checkpoint)
        return checkpoint


def _manifest(store: Store, operation: Operation) -> Manifest | None:
    if operation.checkpoint is None:
        return None
    try:
        return store.manifest(operation.session, operation.checkpoint)
    except (NotFound, IntegrityError):
        return None


def _whole(store: Store, manifest: Manifest) -> bool:
    try:
        store.verify(manifest)
    except (IntegrityError, StoreError):
        return False
    return True


def _adopt(paths: Paths, session: Session) -> None:
    init = session.init
    if init is not None:
        tell_keeper(paths, lambda keeper: keeper.adopt(session.id, init.pid, init.start_time))


def _alive(process: ProcessId) -> bool:
    return procfs.alive(process.pid, process.start_time, process.boot_id)


def _ends(process: ProcessId, seconds: float) -> bool:
    """Whether the process ends within so many seconds."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not _alive(process):
            return True
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(pidfd)
