"""The chunk store: checkpoints as signed manifests over authenticated, deduplicated chunks in append-once packs.

It knows bytes only. Nothing in it can be changed, only added and, when nothing needs it any more, removed.

**In use, so not collected.** Every writer, and every reader for as long as it reads, holds a shared flock on the
store's `lock` file; `collect` needs it exclusively and refuses at once when it cannot have it. So between the moment a
writer finds that a chunk is stored and its commit, and between a reader's first and last chunk, no pack disappears.
Deleting a manifest takes no lock: it only makes chunks collectable. A dead process holds no flock.

**Private until committed.** A writer's packs lie in `incoming` and nobody else refers to them; the commit moves them to
`packs`, then links the manifest. An aborted or killed writer therefore leaves nothing that another checkpoint needs.

**Never believed unread.** The index is a cache. What is read is hashed, what is collected was looked up in the packs,
what is deduplicated was read back from the disk once (`verify` does it where it was not).
"""

from torpor.store.manifest import Manifest, Object
from torpor.store.store import Store
from torpor.store.writer import MAX_SEGMENT, Stats, Writer

__all__ = ["MAX_SEGMENT", "Manifest", "Object", "Stats", "Store", "Writer"]
