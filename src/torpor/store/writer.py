"""One checkpoint on its way into the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from torpor.errors import StoreError
from torpor.store import direct, layout, manifest, pack
from torpor.store.audit import Audit, Progress
from torpor.store.index import Index, Known
from torpor.store.keys import Keys
from torpor.store.layout import Layout
from torpor.store.manifest import Manifest
from torpor.store.stream import OpenPack, PackStream

MAX_SEGMENT = 16 << 20


@dataclass(frozen=True)
class Stats:
    """Bytes of one checkpoint: `logical` as handed over, `stored` after dropping zeros and repetitions, `new` of these
    the ones that the store did not have before."""

    logical: int = 0
    stored: int = 0
    new: int = 0


class Writer:
    """Takes chunks, then `seal`, `verify` and `commit` (verify and commit in either order). A context manager: leaving
    it without a commit aborts. Its packs are private until the commit, so that nobody refers to what may be aborted."""

    def __init__(self, layout_: Layout, keys: Keys, index: Index, *, threads: int, buffer: int) -> None:
        """Waits for a running collection; nothing is collected until the writer is left. Raises StoreError."""
        self._layout, self._keys, self._index = layout_, keys, index
        self._held = ExitStack()
        self._held.enter_context(layout.shared(layout_))
        try:
            index.refresh()
            self._stream = PackStream(layout_, keys, self._announce, threads, buffer)
            self._audit = Audit(layout_, keys, index, self._stream.wait_for_lull, threads)
        except BaseException:
            self._held.close()
            raise
        self._lock = threading.Lock()
        self._seen: set[bytes] = set()
        self._unverified: dict[str, set[bytes]] = {}
        self._logical = self._stored = self._new = 0
        self._closed = self._sealed = self._verified = self._committed = False

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def stats(self) -> Stats:
        """What was put so far."""
        return Stats(self._logical, self._stored, self._new)

    def put(self, segment: memoryview, cuts: Sequence[int]) -> list[bytes]:
        """Store the chunks of a segment (at most 16 MiB), cut at the end offsets `cuts`; return their 32-byte ids.

        A chunk has 1 byte to 1 MiB; whole pages are best. Chunks of zeros and chunks that the store has cost a hash and
        a look-up. Several threads may put at once; the memory is not used after returning. Waits for the disk when it
        cannot keep up. Raises StoreError (no room, disk errors, bad cuts); the checkpoint must then be aborted.
        """
        data = segment.cast("B")
        starts = _checked_starts(len(data), cuts)
        chunk_id = self._keys.chunk_id
        ids = [chunk_id(data[start:end]) for start, end in zip(starts, cuts, strict=True)]
        unseen = {i: span for i, *span in zip(ids, starts, cuts, strict=True) if i not in self._seen}
        known = self._index.known(list(unseen)) if unseen else {}
        with self._lock:
            self._require(not self._closed, "takes no more chunks")
            self._logical += len(data)
            try:
                for i, (start, end) in unseen.items():
                    if i not in self._seen:
                        self._take(i, data[start:end], known.get(i))
            except BaseException:
                self._stream.stop()  # a chunk may be half copied: this writer can only be aborted
                raise
        return ids

    def seal(self) -> None:
        """Every chunk is on the disk, flushed, when this returns; no more can be put. Raises StoreError."""
        with self._lock:
            self._require(not self._closed, "is sealed or was aborted")
            self._closed = True
            self._stream.finish()
            self._sealed = True

    def verify(self, progress: Progress | None = None) -> None:
        """Wait until every new pack was read back from the disk and matched, and read those older packs that were never
        read back. Raises IntegrityError, StoreError. `progress(done, total)` counts packs."""
        self._require(self._sealed, "is not sealed")
        total = len(self._stream.names) + len(self._unverified)
        for done, _ in enumerate(self._audited(), 1):
            if progress:
                progress(done, total)
        self._verified = True
        self._unverified.clear()
        self._tell_index()

    def commit(self, made: Manifest) -> None:
        """Make the checkpoint exist: publish the packs, then put the manifest under its name, which must be new.

        It is durable when this returns. Raises StoreError (name taken, a chunk that is not in the store, no room).
        """
        self._require(self._sealed and not self._committed, "is not sealed, or was committed")
        data = manifest.encode(made, self._keys)
        self._require_chunks(made)
        if self._layout.manifest(made.session, made.checkpoint).exists():
            raise manifest.taken(made)
        try:
            temporary = layout.write_new(self._layout, data)
            try:
                self._publish()
                manifest.link_new(self._layout, temporary, made)
            finally:
                temporary.unlink()
        except OSError as error:
            raise direct.store_error(error, f"The checkpoint {made.checkpoint} cannot be committed") from error
        self._committed = True

    def abort(self) -> None:
        """Remove every pack that is still private and let go of the store; after a commit, only the latter."""
        with self._held:
            self._stream.stop()
            with self._lock:
                self._closed = True
                self._sealed = self._sealed and self._committed
            self._stream.remove()
            self._audit.close()
            self._tell_index()

    def _take(self, chunk_id: bytes, data: memoryview, known: Known | None) -> None:
        if not self._is_zero(chunk_id, data):
            self._stored += len(data)
            if known is None:
                self._new += len(data)
                self._stream.append(chunk_id, data)
            elif not known.verified:
                self._unverified.setdefault(known.pack, set()).add(chunk_id)
        self._seen.add(chunk_id)

    def _is_zero(self, chunk_id: bytes, data: memoryview) -> bool:
        return not data[0] and not data[-1] and self._keys.is_zero_chunk(chunk_id, len(data))

    def _announce(self, whole: OpenPack) -> None:
        self._audit.expect(whole.name, whole.mac)

    def _audited(self) -> Iterator[None]:
        self._tell_index()
        yield from self._audit.settle()
        for name, used in self._unverified.items():
            self._audit.recheck(name, used)
            yield

    def _publish(self) -> None:
        for name in self._stream.names:
            os.rename(self._layout.incoming / name, self._layout.packs / name)
        if self._stream.names:
            direct.sync_folder(self._layout.packs)

    def _tell_index(self) -> None:
        if self._committed:
            self._index.refresh()
            if self._verified:
                self._index.verified(self._stream.names)

    def _require_chunks(self, made: Manifest) -> None:
        named = {one for thing in made.objects.values() for one in zip(thing.ids(), thing.lengths, strict=True)}
        foreign = {i for i, size in named if i not in self._seen and not self._keys.is_zero_chunk(i, size)}
        if foreign and (missing := foreign - self._index.known(list(foreign)).keys()):
            raise StoreError(f"The checkpoint {made.checkpoint} refers to {len(missing)} chunks that are not stored.")

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise StoreError(f"This writer {what}.")


def _checked_starts(size: int, cuts: Sequence[int]) -> list[int]:
    starts = [0, *cuts[:-1]]
    if size > MAX_SEGMENT or (cuts[-1] if cuts else 0) != size:
        raise StoreError(f"A segment has at most {MAX_SEGMENT} bytes and ends with its last cut.")
    if not cuts:
        return []
    if any(not 0 < end - start <= pack.MAX_CHUNK for start, end in zip(starts, cuts, strict=True)):
        raise StoreError(f"A chunk has 1 to {pack.MAX_CHUNK} bytes.")
    return starts
