"""Files in every state that a file can be in."""

from __future__ import annotations

import fcntl
import os
import select
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Generator
from ctypes import CDLL
from pathlib import Path

Creature = Generator[None, str, None]
libc = CDLL(None, use_errno=True)
TRY_LOCKS = """
import fcntl, sys
opened = open(sys.argv[1], 'r+')
for lock in (fcntl.flock, fcntl.lockf):
    try:
        lock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print('free', end=' ')
    except OSError:
        print('locked', end=' ')
"""


def a_pipe_with_contents(folder: Path) -> Creature:
    reading, writing = os.pipe()
    large = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    content = os.urandom(300_000)
    while True:
        os.write(writing, content)
        yield
        assert fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) == large
        seen = b""
        while len(seen) < len(content):
            seen += os.read(reading, 1 << 20)
        assert seen == content


def an_open_file_with_its_place(folder: Path) -> Creature:
    with open(folder / "lines", "w+") as file:
        file.write("".join(f"line {number}\n" for number in range(10_000)))
        file.flush()
        file.seek(0)
        copy = os.dup(file.fileno())
        number = 0
        while True:
            assert file.readline() == f"line {number}\n"
            number += 1
            yield
            assert os.lseek(copy, 0, os.SEEK_CUR) == os.lseek(file.fileno(), 0, os.SEEK_CUR)


def a_file_opened_for_appending(folder: Path) -> Creature:
    path = folder / "appended"
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = fcntl.fcntl(opened, fcntl.F_GETFL)
    lines = 0
    while True:
        yield
        os.write(opened, b"line\n")
        lines += 1
        assert path.read_bytes() == b"line\n" * lines
        assert fcntl.fcntl(opened, fcntl.F_GETFL) == flags
        assert fcntl.fcntl(opened, fcntl.F_GETFD) == fcntl.FD_CLOEXEC


def an_unlinked_file(folder: Path) -> Creature:
    path = folder / "unlinked"
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o604)
    content = os.urandom(3 << 20)
    os.write(opened, content)
    path.unlink()
    while True:
        yield
        assert os.pread(opened, len(content), 0) == content
        assert (os.fstat(opened).st_nlink, os.fstat(opened).st_mode & 0o777) == (0, 0o604)
        assert os.lseek(opened, 0, os.SEEK_CUR) == len(content)
        assert not path.exists()


def an_unlinked_file_with_another_name(folder: Path) -> Creature:
    path = folder / "first name"
    opened = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(opened, b"content")
    os.link(path, folder / "other name")
    path.unlink()
    while True:
        yield
        assert os.pread(opened, 100, 0) == b"content"
        assert os.fstat(opened).st_ino == (folder / "other name").stat().st_ino
        assert not path.exists()
        assert [name for name in os.listdir(folder) if name.startswith("link_remap")] == []


def a_removed_folder(folder: Path) -> Creature:
    path = folder / "removed"
    path.mkdir()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=path, bufsize=0)
    path.rmdir()
    assert child.stdin is not None
    assert child.stdout is not None
    while True:
        yield
        child.stdin.write(b"x\n")
        assert child.stdout.readline() == b"x\n"
        assert not path.exists()


def a_folder_and_a_path_descriptor(folder: Path) -> Creature:
    (folder / "entry").write_text("text")
    listing, path = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), os.open(folder / "entry", os.O_PATH)
    while True:
        yield
        assert "entry" in os.listdir(listing)
        assert Path(f"/proc/self/fd/{path}").read_text() == "text"


def file_locks(folder: Path) -> Creature:
    path, other = folder / "flocked", folder / "fcntl-locked"
    path.touch()
    other.touch()
    first, second = open(path, "r+"), open(other, "r+")  # noqa: SIM115 - held for ever
    fcntl.flock(first, fcntl.LOCK_EX)
    fcntl.lockf(second, fcntl.LOCK_EX)
    while True:
        yield
        for file, expected in ((path, "locked free "), (other, "free locked ")):
            tried = subprocess.run([sys.executable, "-c", TRY_LOCKS, file], check=True, capture_output=True, text=True)
            assert tried.stdout == expected, (file, tried.stdout)


def a_lock_of_an_open_file_description(folder: Path) -> Creature:
    path = folder / "ofd-locked"
    path.touch()
    holder = os.open(path, os.O_RDWR)
    wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 10, 20, 0)
    fcntl.fcntl(holder, 37, wanted)
    while True:
        yield
        other = os.open(path, os.O_RDWR)
        kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(other, 36, wanted))
        os.close(other)
        assert kind == fcntl.F_WRLCK


def a_transaction_of_sqlite(folder: Path) -> Creature:
    database = sqlite3.connect(folder / "base.db", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE facts (word TEXT)")
    database.create_function("twice", 1, lambda text: text * 2)
    reader = sqlite3.connect(folder / "base.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    database.execute("INSERT INTO facts VALUES ('uncommitted')")
    committed = 0
    while True:
        yield
        assert database.in_transaction
        assert reader.execute("SELECT count(*) FROM facts").fetchone() == (committed,)
        assert database.execute("SELECT count(*), max(twice(word)) FROM facts").fetchone() == (
            committed + 1,
            "uncommitteduncommitted",
        )
        database.execute("COMMIT")
        committed += 1
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO facts VALUES ('uncommitted')")


def a_cursor_of_sqlite_in_memory(folder: Path) -> Creature:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE numbers (number)")
    database.executemany("INSERT INTO numbers VALUES (?)", [(number,) for number in range(1000)])
    cursor = database.execute("SELECT number FROM numbers ORDER BY number")
    number = 0
    while True:
        assert cursor.fetchone() == (number,)
        number += 1
        yield


def a_watched_folder(folder: Path) -> Creature:
    watched = folder / "watched"
    watched.mkdir()
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(inotify, os.fsencode(watched), 0x100) > 0
    number = 0
    while True:
        yield
        assert not select.select([inotify], [], [], 0)[0]
        (watched / f"new-{number}").touch()
        number += 1
        assert f"new-{number - 1}".encode() in os.read(inotify, 4096)


def a_named_pipe(folder: Path) -> Creature:
    path = folder / "fifo"
    os.mkfifo(path)
    reading, writing = os.open(path, os.O_RDONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY)
    while True:
        os.write(writing, b"waiting")
        yield
        assert os.read(reading, 100) == b"waiting"


def a_deleted_program_that_runs(folder: Path) -> Creature:
    program = folder / "my-cat"
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o755)
    child = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"up\n")
    assert child.stdout.readline() == b"up\n"
    program.unlink()
    while True:
        word = yield
        child.stdin.write(word.encode() + b"\n")
        assert child.stdout.readline() == word.encode() + b"\n"
