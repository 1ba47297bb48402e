"""Whether a checkpoint can be resumed here, and with what: all reasons at once, and nothing is changed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torpor.durations import spoken_duration
from torpor.engine import compat, files, files_fate, images, ports
from torpor.engine.criu_binary import Version, require_criu
from torpor.engine.files import Mount, OpenFile
from torpor.engine.files_fate import Fate, Judged
from torpor.engine.files_kept import OBJECT
from torpor.errors import Incompatible, IntegrityError
from torpor.model import Checkpoint, Session
from torpor.paths import Paths
from torpor.store import Manifest, Store


@dataclass(frozen=True)
class Compatibility:
    """`reasons` why not (none: it can), `notes` for the owner, and what becomes of each file."""

    reasons: list[str]
    notes: list[str]
    judged: list[Judged] = field(default_factory=list)

    def require(self, session: Session) -> None:
        """Raises Incompatible with every reason."""
        if self.reasons:
            raise Incompatible(
                f"Session {session.name} cannot be restored on this node. " + " ".join(self.reasons),
                safe="Its checkpoint is kept.",
                hint="Resume it where the reasons do not hold, or start it anew.",
            )


def examine(paths: Paths, session: Session, manifest: Manifest, criu: Version) -> Compatibility:
    """Compares a checkpoint's record with this node and with the files that are here now. Reads some of the files."""
    record = manifest.record
    saved, here = msgspec.convert(record["host"], compat.Host), compat.this_host(criu)
    recorded, table = read_files(record)
    judged = [files_fate.judge(one, files_fate.look(one), has_copy=has_copy(paths, manifest, one)) for one in recorded]
    memory = sum(found.size for name, found in manifest.objects.items() if not name.startswith(OBJECT))
    memory += sum(one.file.size for one in judged if one.fate is Fate.OLD)
    cwd = session.launch.cwd
    reasons = compat.objections(saved, here, memory=memory, missing=() if recorded or Path(cwd).exists() else (cwd,))
    reasons += files_fate.missing_mounts(recorded, table, files.mounts())
    reasons += [one.reason for one in judged if one.fate is Fate.REFUSED]
    notes = [f"The node was called {saved.node} and is called {here.node} now."] if saved.node != here.node else []
    return Compatibility(list(dict.fromkeys(reasons)), notes + files_fate.summary(judged), judged)


def rehearse(paths: Paths, session: Session, checkpoint: Checkpoint, newer: list[Checkpoint]) -> dict[str, Any]:
    """What a resume from `checkpoint` would say, with nothing changed: keys `checkpoint`, `created`, `compatible`,
    `reasons`, `notes`, `lost_seconds`. `newer` are checkpoints that cannot be used.

    Raises IntegrityError, NewerFormat, StoreError, SetupError (no CRIU here).
    """
    with Store.open(paths.store, paths.site_key.read_bytes()) as store:
        manifest = store.manifest(session.id, checkpoint.id)
        taken = ports.taken(_open_descriptors(store, manifest))
    found = examine(paths, session, manifest, require_criu(paths).version)
    lost = lost_seconds(session, checkpoint, newer)
    reasons = found.reasons + [f"It listened on port {one}, which is in use now." for one in taken]
    copies = [one.file.name for one in found.judged if one.fate is Fate.COPY]
    return {
        "session": session.id,
        "checkpoint": checkpoint.id,
        "created": checkpoint.created,
        "compatible": not reasons,
        "reasons": reasons,
        "notes": found.notes
        + [f"{name} was changed by somebody else: it is left alone, and copied." for name in copies],
        "lost_seconds": lost,
    }


def pins(paths: Paths, session: str, checkpoint: str) -> Path:
    """The folder of the large files that were pinned for one checkpoint (root only)."""
    return paths.state / "pins" / session / checkpoint


def read_files(record: dict[str, Any]) -> tuple[list[OpenFile], list[Mount]]:
    """The open files and the mounts that a checkpoint's record tells of."""
    packed = record.get("files")
    if packed is None:
        return [], []
    return msgspec.msgpack.decode(packed, type=tuple[list[OpenFile], list[Mount]])


def write_files(found: list[OpenFile], mounts: list[Mount]) -> bytes:
    """The reverse of `read_files`, for the record."""
    return msgspec.msgpack.encode((found, mounts))


def has_copy(paths: Paths, manifest: Manifest, file: OpenFile) -> bool:
    """Whether the recorded content of a file can be had."""
    return file.kept in manifest.objects or pinned(paths, manifest, file) is not None


def pinned(paths: Paths, manifest: Manifest, file: OpenFile) -> Path | None:
    """The pinned file with the recorded content; None when there is none, or when it was changed in its place."""
    if not file.pinned:
        return None
    path = pins(paths, manifest.session, manifest.checkpoint) / file.pinned
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return path if (facts.st_size, facts.st_mtime_ns) == (file.size, file.mtime_ns) else None


def loss(checkpoint: Checkpoint, seconds: float) -> str:
    """The loss as a sentence."""
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.created))
    return f"What it did in the {spoken_duration(seconds)} after its checkpoint of {made} is lost."


def _open_descriptors(store: Store, manifest: Manifest) -> bytes:
    """CRIU's image of all open descriptors."""
    stored = manifest.objects["images"]
    content = memoryview(bytearray(stored.size))
    store.read_into(stored.ids(), content, stored.lengths)
    offset = 0
    for name, size in msgspec.msgpack.decode(stored.meta, type=list[tuple[str, int]]):
        if name == images.FILES:
            return bytes(content[offset : offset + size])
        offset += size
    raise IntegrityError(f"Checkpoint {manifest.checkpoint} has no image of open files.")


def lost_seconds(session: Session, checkpoint: Checkpoint, newer: list[Checkpoint]) -> float:
    """How much of what the session did is lost by going back to `checkpoint`; `newer` are those that cannot be used."""
    until = max([session.died or 0.0, *(one.created for one in newer)])
    return max(until - checkpoint.created, 0.0)
