"""SysV and POSIX inter-process communication, and the session's own /dev/shm."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import stat
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path

Creature = Generator[None, str, None]
IPC_CREAT = 0o1000
SETVAL, GETVAL = 16, 12
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]


class Message(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_long), ("text", ctypes.c_char * 64))


def system_v_shared_memory(folder: Path) -> Creature:
    attached = libc.shmget(0x7001, 1 << 20, IPC_CREAT | 0o600)
    idle = libc.shmget(0x7002, 1 << 20, IPC_CREAT | 0o640)
    assert attached >= 0
    address = libc.shmat(attached, None, 0)
    ctypes.memmove(address, b"attached", 8)
    once = libc.shmat(idle, None, 0)
    ctypes.memmove(once + 5000, b"idle", 4)
    libc.shmdt(ctypes.c_void_p(once))
    while True:
        yield
        assert libc.shmget(0x7001, 0, 0) == attached
        assert libc.shmget(0x7002, 0, 0) == idle
        assert ctypes.string_at(address, 8) == b"attached"
        again = libc.shmat(attached, None, 0)
        assert ctypes.string_at(again, 8) == b"attached"
        ctypes.memmove(address + 100, b"same", 4)
        assert ctypes.string_at(again + 100, 4) == b"same"
        libc.shmdt(ctypes.c_void_p(again))
        once = libc.shmat(idle, None, 0)
        assert ctypes.string_at(once + 5000, 4) == b"idle"
        libc.shmdt(ctypes.c_void_p(once))


def system_v_semaphores(folder: Path) -> Creature:
    semaphores = libc.semget(0x7003, 3, IPC_CREAT | 0o600)
    for number in range(3):
        assert libc.semctl(semaphores, number, SETVAL, ctypes.c_int(number + 5)) == 0
    while True:
        yield
        assert libc.semget(0x7003, 0, 0) == semaphores
        assert [libc.semctl(semaphores, number, GETVAL, 0) for number in range(3)] == [5, 6, 7]


def system_v_messages(folder: Path) -> Creature:
    line = libc.msgget(0x7004, IPC_CREAT | 0o600)
    for kind, text in ((1, b"one"), (2, b"two"), (1, b"three")):
        assert libc.msgsnd(line, ctypes.byref(Message(kind, text)), 64, 0) == 0
    while True:
        yield
        assert libc.msgget(0x7004, 0) == line
        for kind, text in ((2, b"two"), (1, b"one"), (1, b"three")):
            message = Message()
            assert libc.msgrcv(line, ctypes.byref(message), 64, kind, 0o4000) == 64
            assert message.text == text
        for kind, text in ((1, b"one"), (2, b"two"), (1, b"three")):
            assert libc.msgsnd(line, ctypes.byref(Message(kind, text)), 64, 0) == 0


def multiprocessing_semaphores_and_queues(folder: Path) -> Creature:
    context = multiprocessing.get_context("fork")
    semaphore, lock, condition = context.Semaphore(3), context.Lock(), context.Event()
    semaphore.acquire()
    lock.acquire()
    value = context.Value("i", 40)
    queue = context.Queue()
    ours, theirs = context.Pipe()
    child = context.Process(target=_answer, args=(theirs, semaphore, lock, value, queue), daemon=True)
    child.start()
    while True:
        word = yield
        assert semaphore.get_value() == 2
        assert not lock.acquire(block=False)
        assert not condition.is_set()
        ours.send(word)
        assert ours.recv() == [word, 1, False]
        assert queue.get(timeout=10) == word
        with value.get_lock():
            value.value -= 1
        assert value.value == 40
        assert child.is_alive()


def _answer(pipe: Connection, semaphore, lock, value, queue) -> None:  # type: ignore[no-untyped-def]
    while True:
        word = pipe.recv()
        with semaphore:
            left = semaphore.get_value()
        value.value += 1
        queue.put(word)
        pipe.send([word, left, lock.acquire(block=False)])


def a_pool_of_processes(folder: Path) -> Creature:
    pool = multiprocessing.get_context("fork").Pool(2)
    while True:
        word = yield
        assert pool.map(len, [word, word + "!"]) == [len(word), len(word) + 1]


def files_of_dev_shm(folder: Path) -> Creature:
    top = Path("/dev/shm/content")
    top.mkdir(mode=0o750)
    (top / "file").write_bytes(noise := os.urandom(700_001))
    os.chmod(top / "file", 0o640)
    os.chown(top / "file", 1234, 4321)
    os.setxattr(top / "file", "user.colour", b"blue")
    os.link(top / "file", top / "second name")
    os.symlink("file", top / "a link")
    os.symlink("/nowhere", top / "a broken link")
    os.mkfifo(top / "fifo", 0o620)
    (top / "empty folder").mkdir(mode=0o700)
    (top / "nämé").touch()
    with open(top / "sparse", "wb") as sparse:
        sparse.truncate(8 << 30)
        sparse.seek(5 << 30)
        sparse.write(b"far out")
    os.utime(top / "file", ns=(10**18, 10**18 + 7))
    os.utime(top, ns=(10**18, 10**18 + 9))
    reading = os.open(top / "fifo", os.O_RDWR)
    os.write(reading, b"in the fifo")
    while True:
        yield
        assert (top / "second name").read_bytes() == noise
        facts = (top / "file").stat()
        assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (1234, 4321, 0o640)
        assert (facts.st_nlink, facts.st_ino) == (2, (top / "second name").stat().st_ino)
        assert facts.st_mtime_ns == 10**18 + 7
        assert (top.stat().st_mtime_ns, stat.S_IMODE(top.stat().st_mode)) == (10**18 + 9, 0o750)
        assert os.getxattr(top / "file", "user.colour") == b"blue"
        assert os.readlink(top / "a link") == "file"
        assert os.readlink(top / "a broken link") == "/nowhere"
        assert stat.S_ISFIFO((top / "fifo").stat().st_mode)
        assert sorted(os.listdir(top)) == sorted(
            ["file", "second name", "a link", "a broken link", "fifo", "empty folder", "nämé", "sparse"]
        )
        with open(top / "sparse", "rb") as sparse:
            sparse.seek(5 << 30)
            assert sparse.read(10) == b"far out\0\0\0"
        assert (top / "sparse").stat().st_size == 8 << 30
        assert (top / "sparse").stat().st_blocks < 100
        assert os.read(reading, 100) == b"in the fifo"
        os.write(reading, b"in the fifo")
