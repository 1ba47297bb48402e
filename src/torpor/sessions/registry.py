"""The registry: sessions, checkpoints and the journal of operations, in one SQLite file.

The agent and every worker open it at the same time. Each public method is one transaction; what it returns is
already on disk. Ids are strings, times are seconds since the epoch.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from torpor.errors import Conflict, NewerFormat, NotFound, StoreError
from torpor.model import Checkpoint, Operation, OperationKind, ProcessId, Session, State

SCHEMA_VERSION = 1
BUSY_TIMEOUT = 30.0  # seconds that a writer waits for another process's transaction

SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, uid INTEGER NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL,
    created REAL NOT NULL, record BLOB NOT NULL, UNIQUE (uid, name));
CREATE TABLE checkpoints (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, record BLOB NOT NULL);
CREATE INDEX checkpoints_of_session ON checkpoints (session, created);
CREATE TABLE operations (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, started REAL NOT NULL, ended REAL, record BLOB NOT NULL);
CREATE UNIQUE INDEX one_open_operation ON operations (session) WHERE ended IS NULL;
CREATE INDEX operations_of_session ON operations (session, started);
"""

# What each kind of operation may start from, and the state that says it is going on.
STARTS: dict[OperationKind, tuple[frozenset[State], State]] = {
    OperationKind.CHECKPOINT: (frozenset({State.RUNNING}), State.CHECKPOINTING),
    OperationKind.HIBERNATE: (frozenset({State.RUNNING}), State.HIBERNATING),
    OperationKind.RESUME: (frozenset({State.HIBERNATED, State.FAILED, State.ENDED}), State.RESUMING),
}


class Registry:
    """One open registry; may be shared by threads. Raises NotFound for ids that do not exist."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises NewerFormat for a newer schema, StoreError when it cannot be read."""
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
            self._prepare(path)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"The registry {path} cannot be opened: {error}.") from error

    def close(self) -> None:
        """Closes the file; the registry cannot be used any more."""
        with self._lock:
            self._db.close()

    # Sessions

    def create_session(self, session: Session) -> Session:
        """Adds a session. Raises Conflict when its owner already has one of this name."""
        with self._write() as db:
            if db.execute("SELECT 1 FROM sessions WHERE uid=? AND name=?", (session.uid, session.name)).fetchone():
                raise Conflict(
                    f"You already have a session named {session.name}.",
                    hint=f"Choose another name, or remove it with: torpor rm {session.name}",
                )
            db.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
                (session.id, session.uid, session.name, session.state, session.created, _encode(session)),
            )
        return session

    def session(self, session_id: str) -> Session:
        """One session."""
        with self._lock:
            return self._session(session_id)

    def sessions(self, uid: int | None = None) -> list[Session]:
        """All sessions, or those of one owner, oldest first."""
        where, values = ("WHERE uid=?", (uid,)) if uid is not None else ("", ())
        with self._lock:
            rows = self._db.execute(f"SELECT record FROM sessions {where} ORDER BY created, id", values).fetchall()
        return [msgspec.json.decode(row[0], type=Session) for row in rows]

    def by_name(self, uid: int, name: str) -> Session | None:
        """The session of this owner and name, or None."""
        with self._lock:
            row = self._db.execute("SELECT record FROM sessions WHERE uid=? AND name=?", (uid, name)).fetchone()
        return msgspec.json.decode(row[0], type=Session) if row else None

    def update_session(self, session_id: str, **changes: Any) -> Session:
        """Replaces fields; a change of state makes the version grow."""
        with self._write():
            return self._change(self._session(session_id), changes)

    def transition(
        self, session_id: str, expected: frozenset[State] | set[State], new_state: State, **changes: Any
    ) -> Session:
        """Moves to a new state if the present one is expected. Raises Conflict when it is not."""
        with self._write():
            session = self._session(session_id)
            if session.state not in expected:
                raise Conflict(f"Session {session.name} is {session.state}; this needs it to be {_any_of(expected)}.")
            return self._change(session, {**changes, "state": new_state})

    def delete_session(self, session_id: str) -> None:
        """Forgets a session, its checkpoints' rows and its operations. Raises Conflict during an operation."""
        with self._write() as db:
            session = self._session(session_id)
            self._refuse_open_operation(session)
            for table, column in (("sessions", "id"), ("checkpoints", "session"), ("operations", "session")):
                db.execute(f"DELETE FROM {table} WHERE {column}=?", (session_id,))

    def take_lease(self, session_id: str) -> int:
        """The next fencing token of a session; every older one is void from now on."""
        with self._write():
            session = self._session(session_id)
            return self._change(session, {"lease": session.lease + 1}).lease

    def check_lease(self, session_id: str, token: int) -> None:
        """Raises Conflict when somebody took a newer lease."""
        session = self.session(session_id)
        if session.lease != token:
            raise Conflict(
                f"Session {session.name} was resumed by another operation meanwhile.",
                safe="This one stopped before it restored anything.",
            )

    # Checkpoints

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Adds a committed checkpoint."""
        with self._write() as db:
            db.execute(
                "INSERT INTO checkpoints VALUES (?, ?, ?, ?)",
                (checkpoint.id, checkpoint.session, checkpoint.created, _encode(checkpoint)),
            )

    def checkpoints(self, session_id: str) -> list[Checkpoint]:
        """A session's checkpoints, newest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT record FROM checkpoints WHERE session=? ORDER BY created DESC, rowid DESC", (session_id,)
            ).fetchall()
        return [msgspec.json.decode(row[0], type=Checkpoint) for row in rows]

    def checkpoint(self, checkpoint_id: str) -> Checkpoint:
        """One checkpoint."""
        with self._lock:
            row = self._db.execute("SELECT record FROM checkpoints WHERE id=?", (checkpoint_id,)).fetchone()
        if row is None:
            raise NotFound(f"There is no checkpoint {checkpoint_id}.")
        return msgspec.json.decode(row[0], type=Checkpoint)

    def mark_verified(self, checkpoint_id: str, when: float | None = None) -> Checkpoint:
        """Notes that every byte was read back and matched; `when` is now by default, 0 takes the mark away."""
        with self._write() as db:
            checkpoint = self.checkpoint(checkpoint_id)
            checkpoint.verified = (time.time() if when is None else when) or None
            db.execute("UPDATE checkpoints SET record=? WHERE id=?", (_encode(checkpoint), checkpoint_id))
        return checkpoint

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        """Forgets a checkpoint; one that is gone already is no error."""
        with self._write() as db:
            db.execute("DELETE FROM checkpoints WHERE id=?", (checkpoint_id,))

    # The journal

    def begin_operation(
        self,
        session_id: str,
        kind: OperationKind,
        steps: Sequence[str],
        *,
        checkpoint: str | None = None,
        if_idle: bool = False,
    ) -> Operation:
        """Writes the plan and moves the session to the transitional state, at once or not at all.

        Raises Conflict when another operation of this session is in progress, or its state forbids this kind.
        """
        allowed, transitional = STARTS[kind]
        with self._write() as db:
            session = self._session(session_id)
            self._refuse_open_operation(session)
            if session.state not in allowed:
                raise Conflict(f"Session {session.name} is {session.state}; {kind} needs it to be {_any_of(allowed)}.")
            operation = Operation(
                id=secrets.token_hex(8),
                session=session_id,
                kind=kind,
                steps=tuple(steps),
                started=time.time(),
                before=session.state,
                checkpoint=checkpoint,
                if_idle=if_idle,
            )
            db.execute(
                "INSERT INTO operations VALUES (?, ?, ?, NULL, ?)",
                (operation.id, session_id, operation.started, _encode(operation)),
            )
            self._change(session, {"state": transitional})
        return operation

    def mark_step(self, operation_id: str, step: str) -> Operation:
        """Notes that a step is done. Raises Conflict when the operation has ended (somebody recovered it)."""
        with self._write():
            operation = self._open_operation(operation_id)
            if step not in operation.steps:
                raise ValueError(f"{step} is no step of this {operation.kind}")
            return self._store_operation(operation, done=(*operation.done, step))

    def note_processes(self, operation_id: str, processes: Sequence[ProcessId]) -> Operation:
        """Replaces the list of processes that an undo must end."""
        with self._write():
            return self._store_operation(self._open_operation(operation_id), processes=tuple(processes))

    def note_worker(self, operation_id: str, worker: ProcessId) -> Operation:
        """Notes the process that carries the operation out."""
        with self._write():
            return self._store_operation(self._open_operation(operation_id), worker=worker)

    def note_checkpoint(self, operation_id: str, checkpoint_id: str) -> Operation:
        """Notes which checkpoint this operation makes, or resumes from."""
        with self._write():
            return self._store_operation(self._open_operation(operation_id), checkpoint=checkpoint_id)

    def finish_operation(
        self,
        operation_id: str,
        outcome: str,
        state: State,
        *,
        result: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
        **changes: Any,
    ) -> Session:
        """Ends an operation (`outcome`: completed or undone) and moves its session to `state`, at once.

        `changes` are further fields of the session; its `error` becomes `error`. Raises Conflict when the
        operation has already ended.
        """
        with self._write():
            operation = self._open_operation(operation_id)
            self._store_operation(operation, outcome=outcome, ended=time.time(), result=result, error=error)
            return self._change(self._session(operation.session), {**changes, "state": state, "error": error})

    def open_operations(self) -> list[Operation]:
        """Operations in progress, oldest first."""
        return self._operations("ended IS NULL ORDER BY started", ())

    def operation(self, operation_id: str) -> Operation:
        """One operation, in progress or ended."""
        found = self._operations("id=?", (operation_id,))
        if not found:
            raise NotFound(f"There is no operation {operation_id}.")
        return found[0]

    def last_operation(self, session_id: str) -> Operation | None:
        """The newest operation of a session, in progress or ended."""
        found = self._operations("session=? ORDER BY started DESC, rowid DESC LIMIT 1", (session_id,))
        return found[0] if found else None

    # Inside

    def _prepare(self, path: Path) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        with self._write() as db:
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            if version > SCHEMA_VERSION:
                raise NewerFormat(
                    f"The registry {path} has format {version}; this Torpor reads up to {SCHEMA_VERSION}.",
                    safe="Nothing was changed.",
                    hint="Upgrade Torpor.",
                )
            if version == 0:
                for statement in SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"The registry cannot be written: {error}.", safe="Nothing was changed.") from error
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _session(self, session_id: str) -> Session:
        row = self._db.execute("SELECT record FROM sessions WHERE id=?", (session_id,)).fetchone()
        if row is None:
            raise NotFound(f"There is no session {session_id}.")
        return msgspec.json.decode(row[0], type=Session)

    def _change(self, session: Session, changes: dict[str, Any]) -> Session:
        changed: Session = msgspec.structs.replace(session, **changes)
        if changed.state != session.state:
            changed.version = session.version + 1
        if changed != session:
            self._db.execute(
                "UPDATE sessions SET name=?, state=?, record=? WHERE id=?",
                (changed.name, changed.state, _encode(changed), changed.id),
            )
        return changed

    def _operations(self, where: str, values: tuple[str, ...]) -> list[Operation]:
        with self._lock:
            rows = self._db.execute(f"SELECT record FROM operations WHERE {where}", values).fetchall()
        return [msgspec.json.decode(row[0], type=Operation) for row in rows]

    def _open_operation(self, operation_id: str) -> Operation:
        operation = self.operation(operation_id)
        if operation.ended is not None:
            raise Conflict(f"The {operation.kind} {operation_id} has already ended ({operation.outcome}).")
        return operation

    def _store_operation(self, operation: Operation, **changes: Any) -> Operation:
        changed: Operation = msgspec.structs.replace(operation, **changes)
        self._db.execute(
            "UPDATE operations SET ended=?, record=? WHERE id=?", (changed.ended, _encode(changed), changed.id)
        )
        return changed

    def _refuse_open_operation(self, session: Session) -> None:
        going_on = self._operations("session=? AND ended IS NULL", (session.id,))
        if going_on:
            raise Conflict(
                f"A {going_on[0].kind} of session {session.name} is in progress.",
                hint="Wait until it has ended, then ask again.",
            )


def _encode(record: Session | Checkpoint | Operation) -> bytes:
    return msgspec.json.encode(record)


def _any_of(states: frozenset[State] | set[State]) -> str:
    return " or ".join(sorted(state.value for state in states))
