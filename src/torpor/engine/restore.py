"""Bringing a session back: images laid out in private memory, CRIU, and a last question before it runs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torpor.engine import images, places, private_mounts, procfs, yards
from torpor.engine.criu import CriuRun
from torpor.engine.criu_binary import Criu
from torpor.engine.home import Home
from torpor.engine.pagestream import PAGE, SEGMENT, Entry, PageObject, SegmentPool
from torpor.model import ProcessId

ARGUMENTS = (
    *("--restore-detached", "--tcp-close", "--ext-unix-sk", "--file-locks", "--link-remap"),
    *("--manage-cgroups=ignore", "--auto-dedup", "--external", "mnt[]:m"),
)
READERS = 3  # one waits for the disk while two cores hash

Read = Callable[[Sequence[bytes], memoryview, Sequence[int]], None]


def lay_out_memory(folder: Path, objects: Sequence[PageObject], read: Read, progress: Callable[[int], None]) -> None:
    """Writes the pagemaps and pages of `objects` as CRIU's images. `read` authenticates each chunk.

    `progress` is called with the bytes laid out so far. Raises whatever `read` raises.
    """
    done = 0
    for pages_id, found in enumerate(objects, start=1):
        images.write_pagemap(folder, found.kind, found.image_id, pages_id, found.entries)
        done = _write_pages(folder / f"pages-{pages_id}.img", found, read, done, progress)


IN_A_HOME = tuple(argument for argument in ARGUMENTS if argument not in ("--external", "mnt[]:m"))


class Restore:
    """One run of `criu restore`.

    `start` returns with the tree restored but not running; then `let_go` or `undo`.
    """

    def __init__(
        self,
        criu: Criu,
        folder: Path,
        root: Path,
        shared_memory: Path,
        *,
        deadline: float,
        extra: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        note: Callable[[ProcessId], None] = lambda _: None,
        place: Callable[[int], None] = lambda _: None,
        home: Home | None = None,
    ) -> None:
        """`folder` holds the images, `root` is an empty folder, `shared_memory` the laid-out /dev/shm.

        With a `home`, whose /dev/shm is laid out, the tree is restored into that, and `root` and `shared_memory` are
        not used.
        """
        self._home = home
        self._folder = folder
        mounts = ["--root", str(root), "--external", f"mnt[shm]:{shared_memory}"]
        if home is None:
            private_mounts.bind_root(root)
        self._restored: int | None = None
        self.root = 0  # the pid on the node of the first process that was in the images, once it is there
        self._run = CriuRun(
            criu,
            "restore",
            [*ARGUMENTS, *mounts, *extra] if home is None else [*IN_A_HOME, *extra],
            folder,
            deadline=deadline,
            pass_fds=pass_fds,
            note=note,
            place=place,
            inside=home.enter if home else (),
        )

    def start(self) -> int:
        """Restores everything; the tree exists but does not run yet. Returns its init's pid on the node.

        Raises EngineError.
        """
        pid = self.root = self._run.wait_for("post-restore")
        if self._home is not None:
            self.root = self._home.member(pid, procfs.tree(self._run.pid))
            pid = self._home.init.pid
        self._restored = os.pidfd_open(pid)
        if self._home is None:  # else CRIU made none of its mounts
            places.let_follow(pid)
        return pid

    def let_go(self) -> None:
        """Lets the restored tree run. Raises EngineError when CRIU failed at the very end (and ended the tree)."""
        if self._home is not None:
            self._home.settle(self._folder)
        self._run.answer(go_on=True)
        if self._run.wait() != 0:
            raise self._run.failure()
        self._forget_restored()

    def undo(self, keep_log: Path | None = None) -> None:
        """Ends CRIU and everything that it had restored so far."""
        self._run.answer(go_on=False)
        self._run.end()
        self._run.wait()
        if self._home is not None:
            self._home.end()
        if self._restored is not None:
            with contextlib.suppress(ProcessLookupError):  # CRIU has ended it
                signal.pidfd_send_signal(self._restored, signal.SIGKILL)
            self._forget_restored()
        yards.remove_abandoned()
        if keep_log is not None:
            self._run.keep_log(keep_log)

    def _forget_restored(self) -> None:
        if self._restored is not None:
            os.close(self._restored)
            self._restored = None


def empty_object(name: str, entries: bytes) -> PageObject:
    """The PageObject of a manifest's `pages/…` object, still without chunks. Raises ValueError."""
    found = images.parse_object_name(name)
    found.entries = images.unpack_entries(entries)
    return found


def present_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of pages that a pagemap says are in its pages image."""
    return sum(entry.pages for entry in entries if entry.flags & 4) * PAGE


def _write_pages(path: Path, found: PageObject, read: Read, done: int, progress: Callable[[int], None]) -> int:
    """Through buffers that stay: reading from the disk straight into fresh pages of the image costs more."""
    pool = SegmentPool(READERS * SEGMENT)

    def write(piece: tuple[int, slice]) -> int:
        offset, chunks = piece
        lengths = found.lengths[chunks]
        buffer = pool.take()
        try:
            content = buffer[: sum(lengths)]
            read(found.ids[chunks], content, lengths)
            return os.pwrite(image, content, offset)
        finally:
            pool.give(buffer)

    image = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with ThreadPoolExecutor(READERS, thread_name_prefix="torpor-lay-out") as readers:
            for written in readers.map(write, _pieces(found.lengths)):
                done += written
                progress(done)
    finally:
        os.close(image)
    return done


def _pieces(lengths: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Where each piece of at most a segment begins in the image, and which chunks it is made of."""
    offset = first = total = 0
    for number, length in enumerate(lengths):
        if total + length > SEGMENT:
            yield offset, slice(first, number)
            offset, first, total = offset + total, number, 0
        total += length
    if total:
        yield offset, slice(first, len(lengths))
