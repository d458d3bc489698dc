"""The node's cached blocks as the prefix index should know them. Runs on the asyncio thread of rank 0."""

from __future__ import annotations

from kvrelay.core.types import Counters, Incarnation, Role, Tier
from kvrelay.index.writer import PrefixWriter
from kvrelay.prefill_node.jobs import CacheChanged


class Published:
    """Mirrors the prefix cache, so that an index server that came back empty can be told everything again."""

    def __init__(self, *, index_url: str, fleet: str, node: Incarnation, has_host_tier: bool = False) -> None:
        self._here: dict[bytes, None] = {}  # in order of arrival: parents before children
        self._in_host: dict[bytes, None] = {}
        self.counters = Counters()
        self._writer = PrefixWriter(
            index_url, fleet, node=node, role=Role.PREFILL, all_hashes=lambda: list(self._here), counters=self.counters
        )
        self._of_both: PrefixWriter | None = None
        if has_host_tier:
            self._of_both = PrefixWriter(
                index_url, fleet, node=node, role=Role.PREFILL, tier=Tier.HOST,
                all_hashes=lambda: list(self._here | self._in_host), counters=self.counters,
            )  # fmt: skip

    async def start(self) -> None:
        await self._writer.start()
        if self._of_both is not None:
            await self._of_both.start()

    async def stop(self) -> None:
        await self._writer.stop()
        if self._of_both is not None:
            await self._of_both.stop()

    def apply(self, change: CacheChanged) -> None:
        """Publish and retract; only queues."""
        touched = dict.fromkeys((*change.added, *change.removed, *change.host_added, *change.host_removed))
        before = {one for one in touched if self._has(one)}
        for gone in change.removed:
            self._here.pop(gone, None)
        self._here.update(dict.fromkeys(change.added))
        for gone in change.host_removed:
            self._in_host.pop(gone, None)
        self._in_host.update(dict.fromkeys(change.host_added))
        if change.removed:
            self._writer.retract(change.removed)
        if change.added:
            self._writer.publish(change.added)
        if self._of_both is None:
            return
        if lost := [one for one in touched if one in before and not self._has(one)]:
            self._of_both.retract(lost)
        if new := [one for one in touched if one not in before and self._has(one)]:
            self._of_both.publish(new)

    def _has(self, block: bytes) -> bool:
        return block in self._here or block in self._in_host
