"""One holder of one long prefix in an index of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from redis.asyncio import Redis

from kvrelay.core import prefix_hash
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.client import connect
from kvrelay.index.writer import PrefixWriter

_BLOCK_TOKENS = 64
_TIMEOUT_S = 5.0


@asynccontextmanager
async def held_chain(url: str, num_blocks: int) -> AsyncIterator[tuple[str, list[bytes], Redis]]:
    """Yield the name of the fleet, the hashes, and a connection to the server."""
    hashes = prefix_hash.chain(b"", np.arange(num_blocks * _BLOCK_TOKENS, dtype=np.int32), block_tokens=_BLOCK_TOKENS)
    node = Incarnation.new("holder")
    writer = PrefixWriter(url, str(node), node=node, role=Role.PREFILL, all_hashes=lambda: hashes)
    redis = connect(url, timeout_s=_TIMEOUT_S)
    await writer.start()
    writer.publish(hashes)
    while writer.counters.values.get("index_published", 0) < num_blocks:  # noqa: ASYNC110 - a task of the writer sends
        await asyncio.sleep(0.01)
    try:
        yield str(node), hashes, redis
    finally:
        await writer.stop()
        await redis.aclose()
