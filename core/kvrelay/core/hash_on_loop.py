"""Prefix hashes for those who live on an event loop, which a long prompt's many blocks would hold up."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from kvrelay.core import prefix_hash

_MANY_BLOCKS = 4096  # hashed in about 3 ms


async def chain(parent: bytes, tokens: npt.NDArray[np.int32], *, block_tokens: int) -> list[bytes]:
    """Return what `prefix_hash.chain` does; a thread takes many blocks."""
    if len(tokens) < _MANY_BLOCKS * block_tokens:
        return prefix_hash.chain(parent, tokens, block_tokens=block_tokens)
    return await asyncio.to_thread(prefix_hash.chain, parent, tokens, block_tokens=block_tokens)
