"""Keys of one site, one for each purpose, so that nothing made for one can be shown as another.

Every key is derived from the 32-byte site key; the site key itself authenticates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from blake3 import blake3

from torpor.errors import UsageError

SITE_KEY_BYTES = 32
ID_BYTES = 32
MAC_BYTES = 32
KEY_ID_BYTES = 16

_ZEROS = bytes(4096)


@dataclass(frozen=True)
class Keys:
    """Derived keys (32 bytes each) and the public name of the site key (16 bytes)."""

    chunk: bytes = field(repr=False)
    pack: bytes = field(repr=False)
    manifest: bytes = field(repr=False)
    key_id: bytes

    def chunk_id(self, data: memoryview) -> bytes:
        """The 32-byte keyed BLAKE3 of one chunk. Releases the GIL from 2 KiB on."""
        return blake3(data, key=self.chunk).digest()

    def is_zero_chunk(self, chunk_id: bytes, length: int) -> bool:
        """Whether `chunk_id` names `length` zero bytes, which are never stored."""
        return chunk_id == _zero_id(self.chunk, length)


def derive(site_key: bytes) -> Keys:
    """All keys of a site. Raises UsageError unless `site_key` is 32 bytes long."""
    if len(site_key) != SITE_KEY_BYTES:
        raise UsageError(f"A site key has {SITE_KEY_BYTES} bytes, this one has {len(site_key)}.")

    def key_for(purpose: str) -> bytes:
        return blake3(site_key, derive_key_context=f"torpor 2026 store v1 {purpose}").digest()

    return Keys(
        chunk=key_for("chunk id"),
        pack=key_for("pack index mac"),
        manifest=key_for("manifest mac"),
        key_id=key_for("public key id")[:KEY_ID_BYTES],
    )


def mac(key: bytes, *parts: bytes | memoryview) -> bytes:
    """The 32-byte keyed BLAKE3 of `parts` as if they were one. Only for parts whose lengths are bound inside them."""
    hasher = blake3(key=key)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


@lru_cache(maxsize=4096)
def _zero_id(key: bytes, length: int) -> bytes:
    hasher = blake3(key=key)
    for _ in range(length // len(_ZEROS)):
        hasher.update(_ZEROS)
    return hasher.update(_ZEROS[: length % len(_ZEROS)]).digest()
