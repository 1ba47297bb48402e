"""Where each chunk lies: a SQLite cache beside the packs, thrown away and built again whenever it cannot be trusted.

Nothing here is needed for safety. The packs are the truth: `refresh` compares the cache with the folder's listing,
every chunk is authenticated when it is read, and collecting asks the packs themselves. A cache that cannot be opened or
written (full disk) is replaced by one in memory. A damaged one is replaced by a file of the next number, so that a
process that still has the old one open cannot touch the journal of the new one.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torpor.errors import IntegrityError, NewerFormat, StoreError
from torpor.store import direct, pack
from torpor.store.keys import Keys
from torpor.store.layout import Layout

_Result = TypeVar("_Result")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS packs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, size INTEGER NOT NULL,
    verified INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS chunks (
    id BLOB NOT NULL, pack INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    suspect INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (id, pack)) WITHOUT ROWID;
"""
_VERSION = 1
_BATCHES = (64, 8, 1)  # ids in one statement: as many as pay, in few enough different statements to stay prepared
_KNOWN = """SELECT c.id, p.name, p.verified FROM chunks c JOIN packs p ON p.number = c.pack
             WHERE c.id IN ({}) AND NOT c.suspect"""
_FIND = """SELECT c.id, p.name, c.offset, c.length FROM chunks c JOIN packs p ON p.number = c.pack
            WHERE c.id IN ({}) ORDER BY c.suspect DESC"""
_BUSY_SECONDS = 60.0
_DAMAGE = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
}
_FILE_NAME = re.compile(r"index-([1-9][0-9]{0,8})\.db")
_PACK_NAME = re.compile(r"[0-9a-f]{32}")


class Known(NamedTuple):
    """A stored chunk: its pack, and whether that was read back since it was written."""

    pack: str
    verified: bool


class Place(NamedTuple):
    """Where one copy of a chunk lies."""

    pack: str
    offset: int
    length: int


class Index:
    """The cache, shared by all threads of a process and by all processes. `unreadable` says which packs it had to leave
    out, by name, with the reason. Callers of everything but `close` hold the store's lock, shared or exclusive."""

    def __init__(self, layout: Layout, keys: Keys) -> None:
        """Opens, makes or replaces the cache, and brings it up to date. Raises StoreError."""
        self.unreadable: dict[str, str] = {}
        self._layout, self._keys = layout, keys
        self._path: Path | None
        self._lock = threading.RLock()
        self._rebuilt = False
        self._db, self._path = _in_memory(), None
        with self._lock, self._alone():
            try:
                self._use(max(self._files(), default=self._file(1), key=_number))
            except sqlite3.DatabaseError as error:
                self._replace(error)

    @property
    def in_memory(self) -> bool:
        """Whether the cache could not be kept in a file."""
        return not self._path

    def refresh(self) -> None:
        """Adopt packs that appeared, forget those that are gone. Raises StoreError."""
        with self._lock, self._alone():
            self._run(lambda db: self._catch_up(db))

    def rebuild(self) -> bool:
        """Throw the cache away and read every pack's own index; once in the life of this object, else False."""
        with self._lock:
            if self._rebuilt:
                return False
            self._rebuilt = True
            with self._alone():
                self._replace(None)
            return True

    def known(self, ids: Sequence[bytes]) -> dict[bytes, Known]:
        """Those of `ids` that are stored and not suspect."""
        return self._run(lambda db: {row[0]: Known(row[1], bool(row[2])) for row in _among(db, _KNOWN, ids)})

    def find(self, ids: Sequence[bytes]) -> dict[bytes, list[Place]]:
        """All places of those of `ids` that are stored; the last one is the best to try first."""

        def work(db: sqlite3.Connection) -> dict[bytes, list[Place]]:
            places: dict[bytes, list[Place]] = {}
            for chunk_id, name, offset, length in _among(db, _FIND, ids):
                places.setdefault(chunk_id, []).append(Place(name, offset, length))
            return places

        return self._run(work)

    def forget(self, names: Collection[str]) -> None:
        """Remove these packs and their chunks."""
        self._run(lambda db: _forget(db, names))

    def verified(self, names: Iterable[str]) -> None:
        """Every chunk of these packs was read back since it was written."""
        rows = [(name,) for name in names]
        self._run(lambda db: db.executemany("UPDATE packs SET verified = 1 WHERE name = ?", rows))

    def suspect(self, name: str, ids: Iterable[bytes]) -> None:
        """These chunks of this pack are damaged: to be stored anew when they come again, and read elsewhere first."""
        rows = [(chunk_id, name) for chunk_id in ids]
        query = "UPDATE chunks SET suspect = 1 WHERE id = ? AND pack = (SELECT number FROM packs WHERE name = ?)"
        if rows:
            self._run(lambda db: db.executemany(query, rows))

    def distrust(self, name: str) -> None:
        """All chunks of this pack are suspect."""
        self._run(lambda db: _distrust(db, name))

    def close(self) -> None:
        """Close the cache; using it afterwards is an error."""
        with self._lock:
            self._db.close()

    def _run(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        with self._lock:
            try:
                with self._db:
                    return work(self._db)
            except sqlite3.DatabaseError as error:
                if _code(error) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                    raise StoreError(f"The store's index is kept busy by another process ({error}).") from error
                with self._alone():
                    self._replace(error)
            try:
                with self._db:
                    return work(self._db)
            except sqlite3.Error as error:
                raise StoreError(f"The store's index cannot be used ({error}).") from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with direct.opened(self._layout.root, os.O_RDONLY | os.O_DIRECTORY) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def _replace(self, error: sqlite3.DatabaseError | None) -> None:
        damaged = error is None or _code(error) in _DAMAGE
        old = self._files()
        newest = max(map(_number, old), default=0)
        fresh = newest if self._path and newest > _number(self._path) else newest + 1  # another process was first
        if damaged:
            try:
                self._use(self._file(fresh))
            except sqlite3.DatabaseError:
                damaged = False  # a fresh file does not work either: it is the disk, not the file
            else:
                for path in old:
                    if _number(path) == fresh:
                        continue
                    for suffix in ("", "-wal", "-shm"):
                        path.with_name(path.name + suffix).unlink(missing_ok=True)
        if not damaged:
            self._use(None)

    def _use(self, path: Path | None) -> None:
        self._db.close()
        self._path = path
        self._db = _in_memory() if path is None else _in_file(path)
        with self._db:
            self._db.executescript(_SCHEMA)
            self._catch_up(self._db)

    def _catch_up(self, db: sqlite3.Connection) -> None:
        present = {e.name: e.stat().st_size for e in os.scandir(self._layout.packs) if _PACK_NAME.fullmatch(e.name)}
        recorded: dict[str, int] = dict(db.execute("SELECT name, size FROM packs"))
        _forget(db, recorded.keys() - present.keys())
        for name in recorded.keys() & present.keys():
            if recorded[name] != present[name]:
                db.execute("UPDATE packs SET size = ? WHERE name = ?", (present[name], name))
                _distrust(db, name)
        self.unreadable = {}
        for name in sorted(present.keys() - recorded.keys()):
            try:
                entries = self._contents(name)
            except (IntegrityError, NewerFormat, OSError) as error:
                self.unreadable[name] = str(error)
                continue
            _insert(db, name, present[name], entries)

    def _contents(self, name: str) -> list[pack.Entry]:
        fd = pack.open_readable(self._layout, name)
        try:
            return pack.read_contents(fd, name, self._keys).entries
        finally:
            os.close(fd)

    def _files(self) -> list[Path]:
        return [path for path in self._layout.root.iterdir() if _FILE_NAME.fullmatch(path.name)]

    def _file(self, number: int) -> Path:
        return self._layout.root / f"index-{number}.db"


def _number(path: Path) -> int:
    found = _FILE_NAME.fullmatch(path.name)
    return int(found.group(1)) if found else 0


def _code(error: sqlite3.DatabaseError) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _in_memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", check_same_thread=False)


def _in_file(path: Path) -> sqlite3.Connection:
    try:
        with direct.opened(path, os.O_RDWR | os.O_CREAT):
            pass  # SQLite would make it readable for others
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in {0, _VERSION}:
        raise sqlite3.DatabaseError("made by another version, to which it is left")
    db.execute(f"PRAGMA user_version = {_VERSION}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA wal_autocheckpoint = 4000")
    db.execute("PRAGMA cache_size = -32768")
    return db


def _among(db: sqlite3.Connection, query: str, ids: Sequence[bytes]) -> Iterator[Any]:
    start = 0
    for size in _BATCHES:
        statement = query.format(",".join("?" * size))
        while len(ids) - start >= size:
            yield from db.execute(statement, ids[start : start + size])
            start += size


def _insert(db: sqlite3.Connection, name: str, size: int, entries: Iterable[pack.Entry]) -> None:
    number = db.execute("INSERT INTO packs (name, size) VALUES (?, ?)", (name, size)).lastrowid
    rows = ((entry.id, number, entry.offset, entry.length) for entry in entries)
    db.executemany("INSERT OR IGNORE INTO chunks (id, pack, offset, length) VALUES (?, ?, ?, ?)", rows)


def _forget(db: sqlite3.Connection, names: Collection[str]) -> None:
    if names:
        db.executemany("DELETE FROM packs WHERE name = ?", [(name,) for name in names])
        db.execute("DELETE FROM chunks WHERE pack NOT IN (SELECT number FROM packs)")


def _distrust(db: sqlite3.Connection, name: str) -> None:
    db.execute("UPDATE chunks SET suspect = 1 WHERE pack = (SELECT number FROM packs WHERE name = ?)", (name,))
