"""Chained content hash of prompt blocks: the name under which a cached block is found.

Block i's hash covers the seed (layout fingerprint and tenant salt) and all tokens of blocks 0..i, so equal hashes mean
equal prefixes. xxh3-128 over little-endian int32 tokens: the same on every machine and under every PYTHONHASHSEED.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash


def seed(*, fingerprint: bytes, tenant_salt: bytes = b"") -> bytes:
    """Return the parent hash of block 0."""
    return xxhash.xxh3_128_digest(b"kvrelay/1\0" + len(fingerprint).to_bytes(2, "little") + fingerprint + tenant_salt)


def chain(parent: bytes, tokens: npt.NDArray[np.int32], *, block_tokens: int) -> list[bytes]:
    """Return the 16-byte hashes of the full blocks of `tokens`, which follow the block named `parent`."""
    if len(tokens) < block_tokens:
        return []
    raw = np.ascontiguousarray(tokens, dtype="<i4").data.cast("B")  # its slices copy nothing
    step = block_tokens * 4
    digest = xxhash.xxh3_128_digest
    hashes: list[bytes] = []
    for start in range(0, len(raw) - step + 1, step):
        parent = digest(parent + raw[start : start + step])
        hashes.append(parent)
    return hashes
