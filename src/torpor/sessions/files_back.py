"""Giving a session that comes back the files that it had: made before CRIU opens them, and checked afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from torpor.engine import files, files_images
from torpor.engine.files_fate import Fate, Judged
from torpor.engine.files_images import Ghost, Rewrite
from torpor.engine.filetree import SEGMENT
from torpor.engine.plain_paths import open_plain
from torpor.errors import Conflict, Incompatible
from torpor.model import Session
from torpor.paths import Paths
from torpor.sessions.compatibility import Compatibility, pinned
from torpor.store import Manifest, Store

PERMISSIONS = 0o777  # what is made again is never set-user-id


class FilesBack:
    """The files of one resume. `undo` takes away what `prepare` made."""

    def __init__(
        self, paths: Paths, session: Session, store: Store, manifest: Manifest, verdict: Compatibility
    ) -> None:
        self.notes = list(verdict.notes)
        self._paths, self._session, self._store, self._manifest = paths, session, store, manifest
        self._judged = verdict.judged
        self._made: list[tuple[bytes, int]] = []
        self._nameless: dict[bytes, int] = {}
        self._expected: dict[bytes, tuple[int, int]] = {}

    def prepare(self, images: Path) -> None:
        """Makes files that the session writes to, and rewrites CRIU's images in `images`.

        Raises Incompatible when somebody was faster, IntegrityError when a stored copy is damaged, and OSError.
        """
        self._nameless = files_images.nameless(images)
        wanted = {}
        for one in self._judged:
            change = self._change(one)
            if change is not None:
                wanted[one.file.path] = change
        if wanted:
            files_images.rewrite(images, wanted)
        files_images.drop_mounts(images, {mount.path for mount in files.mounts()})

    def check(self, root_pid: int) -> None:
        """Compares what the restored tree (it does not run yet) has open with what was judged.

        Raises Conflict when a path was exchanged in the meantime: nothing may be opened that was not looked at.
        """
        for found in files.survey(root_pid, ours=self._paths.session(self._session.id)) if self._judged else []:
            if found.path == b"/" or found.path.startswith(os.fsencode(self._paths.scratch)):
                continue  # nobody can exchange these; CRIU's own descriptors are still open beside the session's
            if found.kind == "folder" and found.path in self._nameless:
                continue  # CRIU made it a moment ago, and refuses a name that is taken
            if self._expected.get(found.path) != (found.dev, found.ino):
                raise Conflict(
                    f"{found.name} was exchanged while session {self._session.name} was being resumed.",
                    safe="The session is as it was before.",
                    hint="Resume it again.",
                )

    def undo(self) -> None:
        """Removes the visible files that were made."""
        while self._made:
            path, inode = self._made.pop()
            with contextlib.suppress(OSError), _folder_of(path) as folder:
                name = os.path.basename(path)
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino == inode:
                    os.unlink(name, dir_fd=folder)

    def _change(self, one: Judged) -> Rewrite | None:
        """What CRIU has to be told; notes what is expected at the path."""
        file, seen = one.file, one.seen
        match one.fate:
            case Fate.OLD:
                return Rewrite(ghost=Ghost(file.uid, file.gid, file.mode, file.mtime_ns, self._writer(one)))
            case Fate.AGAIN:
                self._make(one, file.path)
                return Rewrite(mode=_made_mode(one))
            case Fate.COPY:
                stamp = time.strftime("%Y%m%d-%H%M%S")
                path = file.path + f".torpor-{self._session.name}-{stamp}".encode()
                self._make(one, path)
                self.notes.append(
                    f"{file.name} was changed by somebody else while the session had it open for writing. That file is "
                    f"left alone: the session goes on with {os.fsdecode(path)}, which has the old content."
                )
                return Rewrite(name=path, mode=_made_mode(one))
            case _:
                self._expected[file.path] = (seen.dev, seen.ino)
                changed = seen.mode != file.mode or one.fate is Fate.GROWN
                return Rewrite(mode=seen.mode, size=seen.size) if changed else None

    def _make(self, one: Judged, path: bytes) -> None:
        file = one.file
        with _folder_of(path) as folder:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                opened = os.open(os.path.basename(path), flags, 0o600, dir_fd=folder)
            except FileExistsError as taken:
                raise Incompatible(f"{os.fsdecode(path)} exists already.", hint="Resume it again.") from taken
        with open(opened, "wb") as target:
            facts = os.fstat(opened)
            self._made.append((path, facts.st_ino))
            self._expected[path] = (facts.st_dev, facts.st_ino)
            self._writer(one)(target)
            target.flush()
            os.fchown(opened, file.uid, file.gid)
            os.fchmod(opened, file.mode & PERMISSIONS)
            os.utime(opened, ns=(file.mtime_ns, file.mtime_ns))

    def _writer(self, one: Judged) -> Callable[[BinaryIO], None]:
        """What writes the recorded content of a file."""

        def from_store(target: BinaryIO) -> None:
            stored = self._manifest.objects[one.file.kept]
            ids, lengths = stored.ids(), list(stored.lengths)
            while ids:
                count = total = 0
                while count < len(ids) and total + lengths[count] <= SEGMENT:
                    total += lengths[count]
                    count += 1
                buffer = memoryview(bytearray(total))
                self._store.read_into(ids[:count], buffer, lengths[:count])
                target.write(buffer)
                del ids[:count], lengths[:count]

        def from_pin(target: BinaryIO) -> None:
            path = pinned(self._paths, self._manifest, one.file)
            if path is None:
                raise Incompatible(f"The pinned copy of {one.file.name} was changed meanwhile.")
            with open(path, "rb") as source:
                shutil.copyfileobj(source, target, SEGMENT)

        return from_store if one.file.kept else from_pin


def _made_mode(one: Judged) -> int:
    return one.file.mode & ~0o7777 | one.file.mode & PERMISSIONS


@contextlib.contextmanager
def _folder_of(path: bytes) -> Iterator[int]:
    folder = open_plain(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)
