"""The files of a session that is being saved: kept before it is frozen, put on record while it is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torpor.engine import files, files_kept
from torpor.engine.files import OpenFile
from torpor.engine.files_kept import FileKeeper, Put
from torpor.errors import IntegrityError, NotFound
from torpor.model import ProcessId
from torpor.sessions import compatibility
from torpor.sessions.executor import Context
from torpor.store import Object

FROZEN = 60.0  # seconds by which a checkpoint's files may have been read before it was made


class FilesSaved:
    """The files of one checkpoint: `begin` while the session runs, `frozen` while it does not, `undo` if it fails."""

    def __init__(self, context: Context, init: ProcessId, checkpoint: str, put: Put) -> None:
        self._context, self._init, self._put = context, init, put
        self._pins = compatibility.pins(context.paths, context.session.id, checkpoint)
        self._files: list[OpenFile] = []
        self._mounts: list[files.Mount] = []
        self._keeper = self._make_keeper()

    @property
    def objects(self) -> Mapping[str, Object]:
        """What the manifest must name, beside what it holds anyway."""
        return self._keeper.objects

    def begin(self) -> None:
        """Keeps what is open now, so that little is left to do later. Raises StoreError."""
        files_kept.release_nameless(self._pins.parent)
        self._keeper.keep(self._survey())

    def frozen(self, *, pin: bool) -> None:
        """Notes what the frozen session has open, and keeps what changed; `pin` also pins large files."""
        self._files = self._survey()
        self._mounts = files.mounts(self._init.pid)
        self._keeper.keep(self._files)
        if pin:
            self._keeper.pin(self._files)

    def record(self) -> bytes:
        """All of it for the checkpoint's record."""
        return compatibility.write_files(self._files, self._mounts)

    def undo(self) -> None:
        """Nothing stays pinned."""
        self._keeper.undo()

    def _survey(self) -> list[OpenFile]:
        return files.survey(self._init.pid, ours=self._context.paths.session(self._context.session.id))

    def _make_keeper(self) -> FileKeeper:
        """One that knows what the last checkpoint kept, if that is known to be whole."""
        context = self._context
        for checkpoint in context.registry.checkpoints(context.session.id)[:1]:
            if checkpoint.verified is not None:
                with contextlib.suppress(NotFound, IntegrityError):
                    parent = context.store.manifest(context.session.id, checkpoint.id)
                    earlier, _ = compatibility.read_files(parent.record)
                    settled = [one for one in earlier if files_kept.is_settled(one, parent.created - FROZEN)]
                    return FileKeeper(self._put, self._pins, settled, parent.objects)
        return FileKeeper(self._put, self._pins, [], {})
