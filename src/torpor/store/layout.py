"""The store's folder: which file lies where, its format record and its lock (the index names its own files)."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import Conflict, IntegrityError, NewerFormat, StoreError, UsageError
from torpor.store import direct
from torpor.store.keys import Keys

FORMAT = 1

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class Layout:
    """Paths of one store. `direct` tells whether packs are written and read with O_DIRECT."""

    root: Path
    direct: bool = True

    @property
    def format(self) -> Path:
        """JSON: format version and key id; made once."""
        return self.root / "format"

    @property
    def lock(self) -> Path:
        """The flock that keeps chunks in use from being collected."""
        return self.root / "lock"

    @property
    def incoming(self) -> Path:
        """Packs and manifests being written, each private to its writer."""
        return self.root / "incoming"

    @property
    def packs(self) -> Path:
        """Whole, durable packs."""
        return self.root / "packs"

    @property
    def manifests(self) -> Path:
        """A folder for each session, in it a committed manifest for each checkpoint."""
        return self.root / "manifests"

    def manifest(self, session: str, checkpoint: str) -> Path:
        """The path of one manifest. Raises UsageError unless both ids are plain words (letters, digits, - and _)."""
        return self.session(session) / checked_id(checkpoint)

    def session(self, session: str) -> Path:
        """The folder of one session's manifests. Raises UsageError as `manifest` does."""
        return self.manifests / checked_id(session)

    def fresh(self) -> Path:
        """A path in `incoming` that nobody else uses."""
        return self.incoming / os.urandom(16).hex()

    @property
    def direct_flag(self) -> int:
        """O_DIRECT, or 0 where the file system refuses it."""
        return os.O_DIRECT if self.direct else 0


def checked_id(name: str) -> str:
    """`name`, if it may become a file name. Raises UsageError."""
    if not is_id(name):
        raise UsageError(f"{name!r} is not an id: 1 to 64 letters, digits, '-' or '_', the first a letter or a digit.")
    return name


def is_id(name: str) -> bool:
    """Whether `name` is a session or checkpoint id."""
    return _ID.fullmatch(name) is not None


def prepare(root: Path, keys: Keys, *, create: bool) -> Layout:
    """The layout of the store at `root`, made when `create` says so.

    Raises StoreError (none there, cannot be made), NewerFormat, IntegrityError (another site's key, damaged record).
    """
    layout = Layout(root)
    try:
        if create:
            _create(layout, keys)
        _check_format(layout, keys)
        return Layout(root, direct.accepts_direct(layout.incoming, layout.format))
    except OSError as error:
        raise direct.store_error(error, f"The store {root} cannot be opened") from error


@contextmanager
def shared(layout: Layout) -> Iterator[None]:
    """Held by everyone who uses chunks: nothing is collected meanwhile. Waits for a running collection."""
    with direct.opened(layout.lock, os.O_RDONLY) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield


@contextmanager
def exclusive(layout: Layout) -> Iterator[None]:
    """Held while collecting. Raises Conflict at once when anyone uses the store."""
    with direct.opened(layout.lock, os.O_RDONLY) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                "The store is in use by a checkpoint or a resume, so nothing can be collected now.",
                safe="Nothing was changed.",
                hint="Collect again when it has ended.",
            ) from error
        yield


def write_new(layout: Layout, data: bytes) -> Path:
    """A durable file in `incoming` with `data`, not yet under its name. Raises OSError, leaving no file."""
    path = layout.fresh()
    try:
        with direct.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            direct.write_fully(fd, memoryview(data), 0)
            os.fsync(fd)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def _create(layout: Layout, keys: Keys) -> None:
    for folder in (layout.root, layout.incoming, layout.packs, layout.manifests):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with direct.opened(layout.lock, os.O_RDONLY | os.O_CREAT):
        pass
    if layout.format.exists():
        return
    record = {"format": FORMAT, "key_id": keys.key_id.hex()}
    temporary = write_new(layout, json.dumps(record).encode() + b"\n")
    try:
        os.link(temporary, layout.format)
    except FileExistsError:
        return  # someone else created the store at the same moment; their record is checked like any other
    finally:
        temporary.unlink()
    direct.sync_folder(layout.root)
    direct.sync_folder(layout.root.parent)


def _check_format(layout: Layout, keys: Keys) -> None:
    if not layout.format.exists():
        raise StoreError(f"There is no store at {layout.root}.", hint="It is made when the agent starts: `torpor up`.")
    try:
        record = json.loads(layout.format.read_bytes())
        version, key_id = int(record["format"]), str(record["key_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"The store's format record {layout.format} is damaged.") from error
    if version > FORMAT:
        raise NewerFormat(
            f"The store {layout.root} has format {version}; this Torpor knows formats up to {FORMAT}.",
            safe="Nothing was changed.",
            hint="Install the newer Torpor that wrote it.",
        )
    if key_id != keys.key_id.hex():
        raise IntegrityError(
            f"The store {layout.root} belongs to another site's key ({key_id}, this one is {keys.key_id.hex()}).",
            safe="Nothing was changed.",
            hint="Put back the site key with which the store was made.",
        )
