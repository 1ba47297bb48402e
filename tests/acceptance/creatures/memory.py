"""Memory of all kinds."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import subprocess
import sys
from collections.abc import Generator
from multiprocessing import shared_memory
from pathlib import Path

Creature = Generator[None, str, None]
PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)


def random_and_zero_memory(folder: Path) -> Creature:
    data = bytearray(os.urandom(8 << 20))
    zeros = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    while True:
        data[:16] = os.urandom(16)
        zeros[40 << 20] ^= 1
        digest, mark = hashlib.sha256(data).digest(), zeros[40 << 20]
        yield
        assert hashlib.sha256(data).digest() == digest
        assert zeros[40 << 20] == mark
        assert zeros[: 1 << 20] == bytes(1 << 20)
        assert zeros[63 << 20 :] == bytes(1 << 20)


def anonymous_memory_shared_with_a_child(folder: Path) -> Creature:
    shared = mmap.mmap(-1, 4 << 20)
    shared[: 1 << 20] = noise = os.urandom(1 << 20)
    question, ask = os.pipe()
    answer, tell = os.pipe()
    if os.fork() == 0:
        while True:
            number = os.read(question, 1)[0]
            shared[2 << 20] = (shared[2 << 20] + number) % 256
            os.write(tell, b"!")
    number = 0
    while True:
        yield
        os.write(ask, b"\x03")
        assert os.read(answer, 1) == b"!"
        number += 3
        assert shared[2 << 20] == number % 256
        assert shared[: 1 << 20] == noise


def named_shared_memory(folder: Path) -> Creature:
    block = shared_memory.SharedMemory(create=True, size=3 << 20)
    block.buf[:1000] = noise = os.urandom(1000)
    open_again = f"""
from multiprocessing import shared_memory, resource_tracker
block = shared_memory.SharedMemory({block.name!r})
resource_tracker.unregister(block._name, 'shared_memory')
print(bytes(block.buf[:1000]).hex())
block.buf[2000] = (block.buf[2000] + 1) % 256
"""
    number = 0
    while True:
        yield
        assert bytes(block.buf[:1000]) == noise
        seen = subprocess.run([sys.executable, "-c", open_again], check=True, capture_output=True, text=True)
        assert seen.stdout.strip() == noise.hex()
        number += 1
        assert block.buf[2000] == number


def an_unlinked_file_of_dev_shm_still_mapped(folder: Path) -> Creature:
    path = Path("/dev/shm/unlinked-but-mapped")
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(opened, 1 << 20)
    shared = mmap.mmap(opened, 1 << 20)
    shared[:5] = b"first"
    path.unlink()
    while True:
        yield
        assert shared[:5] == os.pread(opened, 5, 0)
        assert shared[:5] == b"first"
        os.pwrite(opened, b"again", 100)
        assert shared[100:105] == b"again"


def a_memory_file(folder: Path) -> Creature:
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(sealed, b"content")
    seals = 0x1 | 0x2 | 0x4 | 0x8
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, seals)
    mapped = os.memfd_create("mapped")
    os.ftruncate(mapped, 1 << 20)
    view = mmap.mmap(mapped, 1 << 20)
    view[5000:5004] = b"view"
    while True:
        yield
        assert os.pread(sealed, 100, 0) == b"content"
        assert fcntl.fcntl(sealed, fcntl.F_GET_SEALS) == seals
        assert os.pread(mapped, 4, 5000) == view[5000:5004] == b"view"
        os.pwrite(mapped, b"more", 6000)
        assert view[6000:6004] == b"more"


def mapped_files(folder: Path) -> Creature:
    path = folder / "mapped"
    path.write_bytes(b"o" * (4 * PAGE))
    opened = os.open(path, os.O_RDWR)
    shared = mmap.mmap(opened, 4 * PAGE)
    private = mmap.mmap(opened, 4 * PAGE, flags=mmap.MAP_PRIVATE)
    private[PAGE : PAGE + 4] = b"mine"
    number = 0
    while True:
        yield
        number += 1
        shared[2 * PAGE] = number
        assert os.pread(opened, 1, 2 * PAGE) == bytes([number])
        assert private[PAGE : PAGE + 4] == b"mine"
        assert shared[PAGE : PAGE + 4] == b"oooo"
        assert private[2 * PAGE] == number


def memory_with_special_rights(folder: Path) -> Creature:
    region = mmap.mmap(-1, 16 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region[:4] = b"read"
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert libc.mprotect(address + 4 * PAGE, 4 * PAGE, 0) == 0
    assert libc.mprotect(address, PAGE, 1) == 0
    assert libc.madvise(address + 8 * PAGE, 4 * PAGE, 10) == 0
    assert libc.mlock(address + 12 * PAGE, PAGE) == 0

    def rights() -> list[tuple[str, str, str]]:
        found, mapping = [], ["", ""]
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head, _, rest = line.partition(" ")
            if "-" in head and ":" not in head:
                mapping = [head, rest.split()[0]]
            elif head == "VmFlags:":
                start, _, end = mapping[0].partition("-")
                if int(start, 16) < address + 16 * PAGE and int(end, 16) > address:
                    flags = " ".join(flag for flag in rest.split() if flag not in ("sd", "ac"))
                    found.append((mapping[0], mapping[1], flags))
        return found

    first = rights()
    assert len(first) >= 4
    while True:
        yield
        now = rights()
        assert now == first, (now, first)
        assert region[:4] == b"read"
