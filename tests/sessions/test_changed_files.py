"""What a session had open is changed while it is away: it comes back with what it had, or says why it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sessions.changing import (
    APPENDER,
    CHANGES,
    FOLDER,
    HOLDER,
    LIBRARY,
    MAPPED,
    READER,
    WRITER,
    asleep,
    cycle,
    deleted_with_its_folder,
    led_away,
    notes,
    overwritten,
    refusal,
    replaced,
    wake,
)
from tests.sessions.stage import PYTHON, Stage

from torpor.engine.files_kept import STORED_UP_TO
from torpor.model import OperationKind, State


@pytest.fixture
def folder(stage: Stage) -> Path:
    """A folder that goes with the stage."""
    made = stage.home / "work"
    made.mkdir()
    return made


def test_what_is_only_read_stays_what_it_was(stage: Stage, folder: Path) -> None:
    """Opened or mapped, whatever was done to it; and again when the session is hibernated with it."""
    files = [folder / change.__name__ / "data" for change in CHANGES]
    mapped = [file.with_name("data.mapped") for file in files]
    for file in [*files, *mapped]:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(f"content of {file} as it was".encode())
    session, before = asleep(stage, HOLDER, *files)
    for change, *both in zip(CHANGES, files, mapped, strict=True):
        for file in both if change is not deleted_with_its_folder else both[:1]:
            change(file)
    present = contents(folder)
    lines, operation = wake(stage, session)
    assert set(lines) == set(before)
    for file in [*files, *mapped]:
        assert [note for note in notes(operation) if note.startswith(f"{file} was ") and "old content" in note]
    assert stage.session(session).notes == tuple(notes(operation))
    for _ in range(2):
        assert set(cycle(stage, session)) == set(before)
    assert contents(folder) == present


def contents(folder: Path) -> dict[str, bytes]:
    """What can be seen below a folder; of symbolic links, where they lead."""
    return {
        str(path): os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def test_a_file_that_was_only_touched_or_put_back_is_the_same(stage: Stage, folder: Path) -> None:
    data = folder / "data"
    data.write_bytes(b"content as it was")
    session, before = asleep(stage, READER, data)
    data.unlink()
    data.write_bytes(b"content as it was")
    data.chmod(0o600)
    lines, operation = wake(stage, session)
    assert set(lines) == set(before)
    assert notes(operation) == []


def test_what_somebody_else_changed_is_left_to_them(stage: Stage, folder: Path) -> None:
    data = folder / "data"
    data.write_bytes(b"-" * 20)
    data.chmod(0o640)
    os.chown(data, 12, 34)
    session, before = asleep(stage, WRITER, data)
    number = int(before[-1].split()[0])
    changed = data
    for change in (replaced, overwritten, led_away):
        change(changed)
        theirs = contents(folder)
        lines, operation = wake(stage, session)
        (copy,) = [path for path in folder.iterdir() if str(path) not in theirs]
        assert copy.name.startswith(f"{changed.name}.torpor-one-")
        assert (copy.stat().st_uid, copy.stat().st_gid, copy.stat().st_mode & 0o7777) == (12, 34, 0o640)
        assert lines[0] == f"{number + 1} {b'%08d' % (number + 1) + b'-' * 12!r} {copy}"
        assert [str(copy) in note for note in notes(operation)] == [True]
        assert contents(folder).items() >= theirs.items()
        stage.run(stage.session(session), OperationKind.HIBERNATE)
        number = int(stage.output(session)[-1].split()[0])
        changed = copy


def test_what_was_deleted_and_is_written_is_made_again(stage: Stage, folder: Path) -> None:
    data = folder / "data"
    data.write_bytes(b"-" * 20)
    data.chmod(0o604)
    session, before = asleep(stage, WRITER, data)
    data.unlink()
    lines, operation = wake(stage, session)
    number = int(before[-1].split()[0])
    assert lines[0] == f"{number + 1} {b'%08d' % (number + 1) + b'-' * 12!r} {data}"
    assert [str(data) in note for note in notes(operation)] == [True]
    assert data.stat().st_mode & 0o7777 == 0o604
    assert data.read_bytes()[8:] == b"-" * 12


def test_what_is_written_cannot_come_back_without_its_folder(stage: Stage, folder: Path) -> None:
    (folder / "in").mkdir()
    data = folder / "in" / "data"
    data.write_bytes(b"-" * 20)
    session, _ = asleep(stage, WRITER, data)
    kept = data.read_bytes()
    shutil.rmtree(folder / "in")
    assert f"{data} cannot be made again: its folder is gone" in refusal(stage, session)
    (folder / "in").mkdir()
    data.write_bytes(kept)
    wake(stage, session)


@pytest.mark.parametrize("mode", ["a", "a+"])
def test_a_log_that_grew_is_gone_on_with(stage: Stage, folder: Path, mode: str) -> None:
    log = folder / "log"
    log.write_text("before\n")
    session, before = asleep(stage, APPENDER, log, mode)
    with open(log, "a") as other:
        other.write("somebody else\n")
    lines, operation = wake(stage, session)
    assert notes(operation) == []
    wanted = ["before", *before, "somebody else", *lines]
    assert log.read_text().splitlines()[: len(wanted)] == wanted
    assert os.listdir(folder) == ["log"]


def test_a_log_that_is_read_is_followed(stage: Stage, folder: Path) -> None:
    log = folder / "log"
    log.write_bytes(b"first\n")
    session, _ = asleep(stage, READER, log)
    with open(log, "ab") as other:
        other.write(b"second\n")
    lines, _ = wake(stage, session)
    assert {line.partition(" ")[2] for line in lines} == {repr(b"first\nsecond\n")}


def test_a_log_that_was_rotated_goes_on_beside_the_new_one(stage: Stage, folder: Path) -> None:
    log = folder / "log"
    session, before = asleep(stage, APPENDER, log, "a")
    log.rename(folder / "log.1")
    log.write_text("a new log\n")
    lines, _ = wake(stage, session)
    (copy,) = folder.glob("log.torpor-one-*")
    assert log.read_text() == "a new log\n"
    assert copy.read_text().splitlines()[: len(before) + len(lines)] == [*before, *lines]


def test_a_library_is_replaced(stage: Stage, folder: Path) -> None:
    library = folder / "libz.so"
    shutil.copy(next(Path("/usr/lib").glob("*/libz.so.1")).resolve(), library)
    session, before = asleep(stage, LIBRARY, library)
    library.unlink()
    shutil.copy(next(Path("/usr/lib").glob("*/libm.so.6")).resolve(), library)
    lines, operation = wake(stage, session)
    assert set(lines) == set(before)
    assert [str(library) in note for note in notes(operation)] == [True]
    assert set(cycle(stage, session)) == set(before)
    assert os.listdir(folder) == ["libz.so"]


def test_the_working_directory_is_gone(stage: Stage, folder: Path) -> None:
    work = folder / "here"
    work.mkdir()
    session, before = asleep(stage, FOLDER, work)
    work.rmdir()
    assert f"The folder {work}, which the session works in or has open, is gone." in refusal(stage, session)
    work.mkdir(mode=0o700)
    assert set(wake(stage, session)[0]) == set(before)


def test_a_mount_is_missing(stage: Stage, folder: Path) -> None:
    place = folder / "data"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "data", place], check=True)
    mounted = True
    try:
        (place / "data").write_bytes(b"content")
        session, before = asleep(stage, READER, place / "data")
        kept = (place / "data").stat()
        subprocess.run(["umount", place], check=True)
        mounted = False
        assert f"The mount {place} (tmpfs) is missing; the session uses {place / 'data'} on it." in refusal(
            stage, session
        )
        subprocess.run(["mount", "-t", "tmpfs", "data", place], check=True)
        mounted = True
        (place / "data").write_bytes(b"content")
        os.utime(place / "data", ns=(kept.st_mtime_ns, kept.st_mtime_ns))
        assert set(wake(stage, session)[0]) == set(before)
        stage.run(stage.session(session), OperationKind.HIBERNATE)
    finally:
        if mounted:
            subprocess.run(["umount", place], check=True)


def test_a_mount_that_the_session_does_not_use_may_go(stage: Stage, folder: Path) -> None:
    place, data = folder / "other", folder / "data"
    place.mkdir()
    data.write_bytes(b"content")
    subprocess.run(["mount", "-t", "tmpfs", "other", place], check=True)
    try:
        session, before = asleep(stage, READER, data)
    finally:
        subprocess.run(["umount", place], check=True)
    place.rmdir()
    assert set(wake(stage, session)[0]) == set(before)
    assert set(cycle(stage, session)) == set(before)


def test_a_second_checkpoint_reads_no_file_again(stage: Stage, folder: Path) -> None:
    data = folder / "data"
    data.write_bytes(os.urandom(8 << 20) + bytes(1 << 20))
    os.utime(data, (1, 1))
    session = stage.start(MAPPED, str(data))
    stage.wait_for_output(session, lambda lines: len(lines) >= 2)
    first = stage.run(session, OperationKind.CHECKPOINT).result
    second = stage.run(session, OperationKind.CHECKPOINT).result
    assert first is not None
    assert second is not None
    assert first["bytes_logical"] - second["bytes_logical"] > 8 << 20


def test_the_program_itself_is_upgraded(stage: Stage, folder: Path) -> None:
    program = folder / "python"
    shutil.copy(Path(PYTHON).resolve(), program)
    arguments = [str(program), "-I", "-S", "-c", READER, str(folder / "data")]
    source = f"import os; os.execv({str(program)!r}, {arguments!r})"
    (folder / "data").write_bytes(b"content")
    session, before = asleep(stage, source)
    program.unlink()
    shutil.copy("/bin/cat", program)
    lines, operation = wake(stage, session)
    assert set(lines) == set(before)
    assert [str(program) in note for note in notes(operation)] == [True]
    assert set(cycle(stage, session)) == set(before)


def test_a_large_library_is_pinned_and_comes_back(stage: Stage, folder: Path) -> None:
    """What is too large to be stored with the checkpoint has another name while the session is away."""
    (folder / "in").mkdir()
    large = folder / "in" / "large"
    large.write_bytes(b"content as it was".ljust(1 << 20) + bytes(STORED_UP_TO))
    session, before = asleep(stage, MAPPED, large)
    assert large.stat().st_nlink == 2
    replaced(large)
    lines, operation = wake(stage, session)
    assert set(lines) == set(before)
    assert [str(large) in note for note in notes(operation)] == [True]
    shutil.rmtree(folder / "in")
    assert set(cycle(stage, session)) == set(before)


def test_a_pinned_library_that_is_removed_while_the_session_runs(stage: Stage, folder: Path) -> None:
    (folder / "in").mkdir()
    large = folder / "in" / "large"
    large.write_bytes(b"content as it was".ljust(1 << 20) + bytes(STORED_UP_TO))
    session, before = asleep(stage, MAPPED, large)
    wake(stage, session)
    shutil.rmtree(folder / "in")
    assert set(cycle(stage, session)) == set(before)


def test_what_can_neither_be_matched_nor_had_is_refused_with_its_name(stage: Stage, folder: Path) -> None:
    large = folder / "large"
    large.write_bytes(b"content as it was".ljust(1 << 20) + bytes(STORED_UP_TO))
    facts = large.stat()
    session, before = asleep(stage, MAPPED, large)
    with open(large, "r+b") as other:
        other.write(b"another")
    wanted = f"{large} was changed, and there is no copy of what it was."
    assert wanted in refusal(stage, session)
    with open(large, "r+b") as other:
        other.write(b"content")
    os.utime(large, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert set(wake(stage, session)[0]) == set(before)


def test_a_notebook_is_edited(stage: Stage, folder: Path) -> None:
    notebook = folder / "work.ipynb"
    notebook.write_text('{"cells": []}')
    session, before = asleep(stage, FOLDER, folder)
    (folder / "new").write_text('{"cells": [1]}')
    (folder / "new").rename(notebook)
    lines, operation = wake(stage, session)
    assert set(lines) == set(before)
    assert notes(operation) == []


SHARER = """
import mmap, os, sys, time
opened = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(opened, 0)
os.close(opened)
number = 0
while True:
    number += 1
    mapped[:8] = b"%08d" % number
    print(number, mapped[:8] == b"%08d" % number, flush=True)
    time.sleep(0.001)
"""


def test_what_is_written_through_a_mapping_is_kept_as_it_was_last(stage: Stage, folder: Path) -> None:
    """Such writes leave the time of the file as it is, so that nothing tells that it was changed."""
    data = folder / "data"
    data.write_bytes(bytes(1 << 16))
    session = stage.start(SHARER, str(data))
    stage.wait_for_output(session, lambda lines: len(lines) >= 2)
    stage.run(session, OperationKind.CHECKPOINT)
    stage.run(stage.session(session), OperationKind.HIBERNATE)
    last = int(data.read_bytes()[:8])
    assert int(stage.output(session)[-1].split()[0]) in (last, last - 1)
    replaced(data)
    worker = stage.begin(stage.session(session), OperationKind.RESUME, pause_after="restore")
    worker.wait_for_pause()
    (copy,) = folder.glob("data.torpor-one-*")
    assert int(copy.read_bytes()[:8]) == last
    worker.go_on()
    worker.wait()
    operation = stage.registry.operation(worker.operation.id)
    assert operation.outcome == "completed", operation.error
    seen = len(stage.output(session))
    stage.wait_for_output(session, lambda lines: len(lines) > seen + 2)
    assert int(copy.read_bytes()[:8]) > last
    assert data.read_bytes() == b"quite another content"


TWO = """
import sys, time
first, second = open(sys.argv[1]), open(sys.argv[2], "r+")
while True:
    print("there", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("exchange", [Path.symlink_to, Path.hardlink_to])
def test_what_is_exchanged_during_the_resume_is_not_opened(
    stage: Stage, folder: Path, exchange: Callable[[Path, Path], None]
) -> None:
    """After everything was looked at, a path leads elsewhere: the session must not get what is there."""
    first, second, secret = (folder / name for name in ("first", "second", "secret"))
    for path in (first, second, secret):
        path.write_text("sixteen letters.")
    session, _ = asleep(stage, TWO, first, second)
    overwritten(second)
    worker = stage.begin(session, OperationKind.RESUME, pause_after="lay_out")
    worker.wait_for_pause()
    first.unlink()
    exchange(first, secret)
    worker.go_on()
    worker.wait()
    operation = stage.registry.operation(worker.operation.id)
    assert operation.outcome == "undone"
    assert operation.error is not None
    assert "was exchanged" in operation.error["message"]
    assert "first" in operation.error["message"]
    assert stage.session(session).state is State.HIBERNATED
    assert sorted(os.listdir(folder)) == ["first", "second", "secret"]
    wake(stage, session)
    assert len(os.listdir(folder)) == 4
