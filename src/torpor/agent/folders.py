"""The folders and the site key that an agent finds or makes when it starts."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from pathlib import Path

from torpor.errors import Conflict, IntegrityError, SetupError
from torpor.paths import Paths

KEY_BYTES = 32

# Anyone may reach the sockets and the own session's folder below; nobody else may list or read.
TRAVERSED = 0o711
PRIVATE = 0o700
LISTED = 0o755


def prepare(paths: Paths) -> None:
    """Creates every folder with its mode, or corrects the mode. Raises SetupError when that is not possible, Conflict
    when an earlier version still works in them."""
    folders = {
        paths.run: LISTED,
        paths.state: TRAVERSED,
        paths.state / "sessions": TRAVERSED,
        paths.logs: PRIVATE,
        paths.database.parent: PRIVATE,
        paths.scratch: PRIVATE,
        paths.state / "pins": PRIVATE,
        paths.site_key.parent: PRIVATE,
    }
    try:
        for folder, mode in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
        move_registry(paths.state / "torpor.db", paths.database)
    except (OSError, sqlite3.Error) as error:
        message = f"The folders of Torpor cannot be prepared: {error}."
        raise SetupError(message, hint="Run the agent as root.") from error


def site_key(paths: Paths) -> bytes:
    """The site's key, 32 bytes; made on the first start. Raises IntegrityError when the file is not such a key."""
    path = paths.site_key
    if not path.exists():
        _create_key(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise IntegrityError(
            f"The site key {path} has {len(key)} bytes instead of {KEY_BYTES}.",
            safe="Nothing was written with it.",
            hint="Restore it from your backup: checkpoints made with the right key cannot be read without it.",
        )
    return key


def move_registry(earlier: Path, now: Path) -> None:
    """Earlier versions had it where everybody saw its size. Raises Conflict while one of their workers uses it."""
    if not earlier.exists() or now.exists():
        return
    with contextlib.closing(sqlite3.connect(earlier)) as registry:
        registry.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if earlier.with_name(f"{earlier.name}-wal").exists():
        raise Conflict(
            f"An operation that an earlier version of Torpor began still uses {earlier}.",
            safe="It goes on.",
            hint="Start the agent again when it has ended.",
        )
    earlier.rename(now)


def _create_key(path: Path) -> None:
    """Makes the key complete or not at all: two agents that start at once end up with the same one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(KEY_BYTES))
        os.fsync(descriptor)
        os.link(draft, path)
    except FileExistsError:
        pass  # another agent was faster; its key counts
    finally:
        os.close(descriptor)
        draft.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
