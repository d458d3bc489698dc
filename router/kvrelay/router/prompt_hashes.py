"""Block hashes of a prompt, as the nodes of the fleet make them for the tenant that is calling."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvrelay.core import prefix_hash
from kvrelay.router.fleet import NodeView
from kvrelay.router.tenants import calling

_HASHED_AT_ONCE_TOKENS = 1 << 16  # in about 0.2 ms


async def hashes_by_layout(nodes: Sequence[NodeView], token_ids: npt.NDArray[np.int32]) -> Mapping[bytes, list[bytes]]:
    """Return the block hashes of a prompt for each page layout, in a thread when they take long: a million tokens
    would be felt by every other stream."""
    found = {}
    for layout, node in {node.layout_fingerprint: node for node in nodes}.items():
        if len(token_ids) <= _HASHED_AT_ONCE_TOKENS:
            found[layout] = _hashes(node, token_ids)
        else:
            found[layout] = await asyncio.to_thread(_hashes, node, token_ids)
    return found


def seed_of(node: NodeView) -> bytes:
    return prefix_hash.seed(fingerprint=node.layout_fingerprint, tenant_salt=calling.get().salt)


def _hashes(node: NodeView, token_ids: npt.NDArray[np.int32]) -> list[bytes]:
    return prefix_hash.chain(seed_of(node), token_ids, block_tokens=node.block_tokens)
