"""Everything by which one rank has cached blocks written into its pages by other nodes, wired together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters, Incarnation
from kvrelay.kv_transfer.pool_agent import PoolAgent, end_hub, reader_hub
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node.rank_fetcher import RankFetcher
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.prefill_node.wiring import transfer_limits
from kvrelay.prefill_node.writer_watch import watch_writers


class Pulls:
    """Make it on the event loop of the rank's process."""

    def __init__(
        self,
        settings: PrefillSettings,
        loaded: Loaded,
        node: Incarnation,
        rank: int,
        agent: PoolAgent,
        *,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called on the loop when rank 0 is to hear something."""
        limits = transfer_limits(settings)
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        self.fetcher = RankFetcher(
            rank=rank,
            page_tokens=loaded.pool.layout.page_tokens,
            loop=asyncio.get_running_loop(),
            limits=limits,
            wake=wake,
        )
        self._agent = agent
        self.hub = reader_hub(agent, loaded.pool, node=node, callbacks=self.fetcher.callbacks, limits=limits)
        self.fetcher.wire(self.hub)

    @property
    def counters(self) -> Counters:
        """How the hand-offs went."""
        return self.hub.counters

    def start(self, endpoint: str) -> None:
        """Begin; `endpoint` is where the nodes that are pulled from call this rank."""
        self.hub.endpoint = endpoint
        settings = self._settings
        watch = watch_writers(
            self.hub, index_url=settings.index_url, fleet=settings.fleet, period_s=settings.heartbeat_s
        )
        self._tasks = [keep(self.fetcher.keep_time(), name="time of pulls"), keep(watch, name="writer watch")]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        end_hub(self._agent, self.hub)
