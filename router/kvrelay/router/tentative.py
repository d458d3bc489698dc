"""Blocks that are on their way: which nodes have or will have how much of a prompt by what was placed on them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvrelay.core.bits import positions


class TentativeBlocks:
    """Blocks of requests by node, where nodes are small numbers. A request's blocks are added and removed together.

    A block's hash stands for all blocks before it, so the nodes that have a block have all before it, and whoever
    misses one has none behind it: halving finds where each node's blocks end.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}  # block -> bits of its nodes
        self._more: dict[int, dict[bytes, int]] = {}  # node -> requests by block, besides the first of each block

    def add(self, node: int, hashes: Sequence[bytes]) -> None:
        masks, bit = self._masks, 1 << node
        for one in hashes:
            mask = masks.get(one)
            if mask is None:
                masks[one] = bit  # the same object for all blocks of one node
            elif mask & bit:
                more = self._more.setdefault(node, {})
                more[one] = more.get(one, 0) + 1
            else:
                masks[one] = mask | bit

    def remove(self, node: int, hashes: Sequence[bytes]) -> None:
        masks, bit = self._masks, 1 << node
        more = self._more.get(node, {})
        for one in hashes:
            if more and (left := more.get(one)) is not None:
                if left > 1:
                    more[one] = left - 1
                else:
                    del more[one]
            elif (mask := masks[one]) == bit:
                del masks[one]
            else:
                masks[one] = mask ^ bit
        if not more:
            self._more.pop(node, None)

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
