"""sqlite in WAL mode: a transaction that is open, a reader with a snapshot, and what was committed."""

import sqlite3

from asked import FOLDER, serve

writer = sqlite3.connect(FOLDER / "data.db", isolation_level=None)
assert writer.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
writer.execute("CREATE TABLE items (number INTEGER PRIMARY KEY, text TEXT)")
writer.executemany("INSERT INTO items (text) VALUES (?)", [(f"item {n}",) for n in range(1000)])
reader = sqlite3.connect(FOLDER / "data.db", isolation_level=None)
committed = 1000


def begin() -> None:
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM items").fetchone() == (committed,)
    writer.execute("BEGIN IMMEDIATE")
    writer.executemany("INSERT INTO items (text) VALUES (?)", [(f"new {n}",) for n in range(100)])


begin()


def is_locked(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as busy:
        return "locked" in str(busy)
    return False


def check(_: int) -> None:
    global committed
    assert writer.in_transaction
    assert writer.execute("SELECT count(*) FROM items").fetchone() == (committed + 100,)
    assert reader.execute("SELECT count(*) FROM items").fetchone() == (committed,)
    other = sqlite3.connect(FOLDER / "data.db", timeout=0)
    assert is_locked(other)
    other.close()
    writer.execute("COMMIT")
    reader.execute("COMMIT")
    committed += 100
    assert writer.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    begin()


serve(check)
