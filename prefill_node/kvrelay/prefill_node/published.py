"""The node's cached blocks as the prefix index should know them. Runs on the asyncio thread of rank 0."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.core.types import Counters, Incarnation, Role
from kvrelay.index.writer import PrefixWriter
from kvrelay.prefill_node.jobs import CacheChanged


class Published:
    """Mirrors the prefix cache, so that an index server that came back empty can be told everything again."""

    def __init__(self, *, index_url: str, fleet: str, node: Incarnation) -> None:
        self._hashes: dict[bytes, None] = {}  # in order of arrival: parents before children
        self._writer = PrefixWriter(index_url, fleet, node=node, role=Role.PREFILL, all_hashes=self._all)

    @property
    def counters(self) -> Counters:
        return self._writer.counters

    async def start(self) -> None:
        await self._writer.start()

    async def stop(self) -> None:
        await self._writer.stop()

    def apply(self, change: CacheChanged) -> None:
        """Publish and retract; only queues."""
        for gone in change.removed:
            self._hashes.pop(gone, None)
        self._hashes.update(dict.fromkeys(change.added))
        if change.removed:
            self._writer.retract(change.removed)
        if change.added:
            self._writer.publish(change.added)

    def _all(self) -> Iterable[bytes]:
        return list(self._hashes)
