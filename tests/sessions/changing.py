"""Programs that have files open, and what happens to these while the programs are away."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.sessions.stage import Stage

from torpor.model import Operation, OperationKind, Session, State

READER = """
import os, sys, time
data = open(sys.argv[1], "rb")
data.read(4)
while True:
    print(data.tell(), os.pread(data.fileno(), 100, 0), flush=True)
    time.sleep(0.05)
"""
MAPPED = """
import mmap, os, sys, time
opened = os.open(sys.argv[1], os.O_RDONLY)
mapped = mmap.mmap(opened, 0, prot=mmap.PROT_READ)
os.close(opened)
while True:
    print(len(mapped), mapped[:20], flush=True)
    time.sleep(0.05)
"""
HOLDER = """
import mmap, os, sys, time
opened = [open(name, "rb") for name in sys.argv[1:]]
mapped = []
for name in sys.argv[1:]:
    descriptor = os.open(name + ".mapped", os.O_RDONLY)
    mapped.append(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    os.close(descriptor)
for one in opened:
    one.read(4)
while True:
    print([(one.tell(), os.pread(one.fileno(), 100, 0)) for one in opened], [one[:] for one in mapped], flush=True)
    time.sleep(0.05)
"""
WRITER = """
import os, sys, time
data = open(sys.argv[1], "r+b", buffering=0)
number = 0
while True:
    number += 1
    data.seek(0)
    data.write(b"%08d" % number)
    print(number, os.pread(data.fileno(), 100, 0), os.readlink(f"/proc/self/fd/{data.fileno()}"), flush=True)
    time.sleep(0.05)
"""
APPENDER = """
import os, sys, time
log = open(sys.argv[1], sys.argv[2])
number = 0
while True:
    number += 1
    print(number, file=log, flush=True)
    print(number, flush=True)
    time.sleep(0.05)
"""
LIBRARY = """
import ctypes, sys, time
library = ctypes.CDLL(sys.argv[1])
library.crc32.restype = ctypes.c_ulong
while True:
    print(library.crc32(0, b"abc", 3), library.adler32(1, b"abc", 3), flush=True)
    time.sleep(0.05)
"""
FOLDER = """
import os, sys, time
os.chdir(sys.argv[1])
while True:
    print(os.listdir("."), flush=True)
    time.sleep(0.05)
"""


def asleep(stage: Stage, source: str, *arguments: str | os.PathLike[str]) -> tuple[Session, list[str]]:
    """A session that was hibernated after it had printed, and its lines so far."""
    session = stage.start(source, *map(str, arguments))
    stage.wait_for_output(session, lambda lines: len(lines) >= 2)
    stage.run(session, OperationKind.HIBERNATE)
    return stage.session(session), stage.output(session)


def wake(stage: Stage, session: Session) -> tuple[list[str], Operation]:
    """Resumes it; the lines that it prints then, and the operation."""
    here = len(stage.output(session))
    operation = stage.run(stage.session(session), OperationKind.RESUME)
    lines = stage.wait_for_output(session, lambda lines: len(lines) >= here + 3)
    return lines[here:], operation


def refusal(stage: Stage, session: Session) -> str:
    """A resume that must be refused as incompatible and change nothing; its sentences."""
    worker = stage.begin(stage.session(session), OperationKind.RESUME)
    worker.wait()
    operation = stage.registry.operation(worker.operation.id)
    assert operation.outcome == "undone"
    assert operation.error is not None
    assert operation.error["code"] == "incompatible"
    assert stage.session(session).state is State.HIBERNATED
    return operation.error["message"]


def notes(operation: Operation) -> list[str]:
    assert operation.result is not None
    found: list[str] = operation.result["notes"]
    return found


def cycle(stage: Stage, session: Session) -> list[str]:
    """Hibernated and resumed once more; the lines since."""
    stage.run(stage.session(session), OperationKind.HIBERNATE)
    return wake(stage, session)[0]


def replaced(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"quite another content")
    new.rename(path)


def overwritten(path: Path) -> None:
    path.write_bytes(b"quite another content")


def deleted(path: Path) -> None:
    path.unlink()


def deleted_with_its_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def led_away(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/shadow")


CHANGES = [replaced, overwritten, deleted, deleted_with_its_folder, led_away]
