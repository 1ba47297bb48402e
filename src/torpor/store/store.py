"""The store as the layers above see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torpor.store import collector, layout, manifest, pack
from torpor.store.audit import Progress
from torpor.store.index import Index
from torpor.store.keys import Keys, derive
from torpor.store.layout import Layout
from torpor.store.manifest import Manifest
from torpor.store.reader import Reader
from torpor.store.stream import BUFFER_BYTES
from torpor.store.writer import Writer


class Store:
    """One store in a local folder, for many threads; the folder is for many processes. Open it again after a fork."""

    def __init__(self, layout_: Layout, keys: Keys, index: Index) -> None:
        """Use `Store.open`."""
        self._layout, self._keys, self._index = layout_, keys, index
        self._reader = Reader(layout_, keys, index)
        self._readers = 0
        self._readers_lock = threading.Lock()
        self._readers_hold = ExitStack()

    @classmethod
    def open(cls, folder: Path, key: bytes, *, create: bool = False) -> Store:
        """Open the store in `folder` with the 32-byte site key; `create` makes it first if there is none.

        Raises StoreError (none there, disk errors), NewerFormat, IntegrityError (another site's key), UsageError.
        """
        keys = derive(key)
        layout_ = layout.prepare(folder.resolve(), keys, create=create)
        with layout.shared(layout_):
            return cls(layout_, keys, Index(layout_, keys))

    def close(self) -> None:
        """Close the index. Writers and readers must have ended."""
        self._index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def key_id(self) -> str:
        """The public name of the site key, hex: what a manifest's `key_id` must be."""
        return self._keys.key_id.hex()

    @property
    def facts(self) -> dict[str, Any]:
        """For diagnosis: `folder`, `format`, `key_id`, `direct_io`, `index` ("file" or "memory": the disk takes none),
        `unreadable_packs` (name -> reason)."""
        return {
            "folder": str(self._layout.root),
            "format": layout.FORMAT,
            "key_id": self.key_id,
            "direct_io": self._layout.direct,
            "index": "memory" if self._index.in_memory else "file",
            "unreadable_packs": dict(self._index.unreadable),
        }

    def writer(self, *, threads: int = 3, buffer: int = BUFFER_BYTES) -> Writer:
        """A writer for one checkpoint, with `threads` disk threads and `threads + 2` buffers of `buffer` bytes.

        A buffer has at least 1 MiB.
        A context manager; leaving it without a commit aborts. Waits for a running collection. Raises StoreError.
        """
        return Writer(self._layout, self._keys, self._index, threads=threads, buffer=max(buffer, pack.MAX_CHUNK))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep every chunk from being collected meanwhile, even if its checkpoint is deleted: hold it while resuming.
        Waits for a running collection; may be nested and used by several threads."""
        with self._readers_lock:
            if self._readers == 0:
                self._readers_hold.enter_context(layout.shared(self._layout))
            self._readers += 1
        try:
            yield
        finally:
            with self._readers_lock:
                self._readers -= 1
                if self._readers == 0:
                    self._readers_hold.close()

    def read_into(self, ids: Sequence[bytes], out: memoryview, lengths: Sequence[int]) -> None:
        """Fill the writable `out` with the chunks `ids` of `lengths` bytes, one after another, each authenticated.

        Fastest when `out` and every length are whole pages: the disk then writes straight into it. Neighbours in a pack
        are read together. May be called by several threads. Raises IntegrityError when a chunk is missing or damaged
        (`out` then holds nothing to be used), StoreError when the lengths do not fit `out`.
        """
        with self.reading():
            self._reader.read_into(ids, out, lengths)

    def verify(self, made: Manifest, progress: Progress | None = None) -> None:
        """Read and authenticate every chunk of a manifest, calling `progress(bytes done, bytes in total)`.

        Raises IntegrityError for the first chunk that is missing or damaged.
        """
        with self.reading():
            self._reader.verify(made, progress)

    def manifest(self, session: str, checkpoint: str) -> Manifest:
        """A committed manifest, authenticated before it is parsed.

        Raises NotFound, IntegrityError (damaged, another site's key), NewerFormat, StoreError, UsageError (not an id).
        """
        return manifest.read(self._layout, self._keys, session, checkpoint)

    def manifests(self, session: str | None = None) -> list[tuple[str, str]]:
        """(session, checkpoint) of every committed manifest, or of one session's, sorted; they are not read."""
        return manifest.names(self._layout, session)

    def delete(self, session: str, checkpoint: str) -> None:
        """Remove a checkpoint durably, readable or not; `collect` gives its space back. Raises NotFound, StoreError."""
        manifest.delete(self._layout, session, checkpoint)

    def sweep(self) -> int:
        """Remove what dead writers left and return the bytes freed: quick, whatever the size of the store.

        Raises Conflict when a writer or a reader is at work, StoreError.
        """
        return collector.sweep(self._layout)

    def collect(self) -> int:
        """Remove packs that no manifest needs, and what dead writers left; return the bytes freed.

        Raises Conflict when a writer or a reader is at work, in this process or another; IntegrityError or NewerFormat
        when a manifest cannot be read (nothing is removed then); StoreError.
        """
        return collector.collect(self._layout, self._keys, self._index)
