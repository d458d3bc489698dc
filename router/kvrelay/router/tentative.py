"""Blocks that are on their way: which nodes have or will have how much of a prompt by what was placed on them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from kvrelay.core.bits import positions


class TentativeBlocks:
    """Blocks of requests by node, where nodes are small numbers. A request's blocks are added and removed together.

    A block's hash stands for all blocks before it, so the nodes that have a block have all before it, and whoever
    misses one has none behind it: halving finds where each node's blocks end.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Counter[bytes]] = {}  # node -> requests by block
        self._masks: dict[bytes, int] = {}  # block -> bits of its nodes

    def add(self, node: int, hashes: Sequence[bytes]) -> None:
        if not hashes:
            return
        counts, masks, bit = self._counts.setdefault(node, Counter()), self._masks, 1 << node
        for one in hashes:
            if one not in counts:
                mask = masks.get(one)
                masks[one] = bit if mask is None else mask | bit
        counts.update(hashes)

    def remove(self, node: int, hashes: Sequence[bytes]) -> None:
        if not hashes:
            return
        counts, masks, bit = self._counts[node], self._masks, 1 << node
        for one in hashes:
            if counts[one] > 1:
                counts[one] -= 1
                continue
            del counts[one]
            if mask := masks[one] & ~bit:
                masks[one] = mask
            else:
                del masks[one]
        if not counts:
            del self._counts[node]

    def longest(self, hashes: Sequence[bytes]) -> dict[int, int]:
        """Return how many leading blocks of a prompt each node has; nodes that have none are left out."""
        found: dict[int, int] = {}
        masks = self._masks
        here = masks.get(hashes[0], 0) if hashes else 0
        depth = 1
        while here:
            depth = bisect_left(
                hashes,
                True,
                lo=depth,
                key=lambda one, here=here: masks.get(one, 0) != here,  # type: ignore[misc]
            )
            deeper = masks.get(hashes[depth], 0) if depth < len(hashes) else 0
            found.update(dict.fromkeys(positions(here & ~deeper), depth))
            here &= deeper
        return found
