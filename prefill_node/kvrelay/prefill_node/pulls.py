"""Everything by which a node of one rank fetches cached blocks from others, wired together."""

from __future__ import annotations

import asyncio

from grpc import aio

from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters, Incarnation
from kvrelay.kv_transfer import hub_servicer
from kvrelay.kv_transfer.pool_agent import PoolAgent, end_hub, reader_hub
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node.puller import Puller
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.prefill_node.step_answer import OnStep
from kvrelay.prefill_node.wiring import transfer_limits
from kvrelay.prefill_node.writer_watch import watch_writers


class Pulls:
    """Make it on the event loop; of a larger ring each rank would need its own, so those pull nothing."""

    def __init__(
        self,
        settings: PrefillSettings,
        loaded: Loaded,
        node: Incarnation,
        agent: PoolAgent,
        *,
        on_step: OnStep,
    ) -> None:
        layout, limits = loaded.pool.layout, transfer_limits(settings)
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        self.puller = Puller(
            on_step=on_step,
            block_tokens=layout.block_tokens,
            row_bytes=layout.row_bytes * layout.num_layers,
            timeout_s=settings.pull_timeout_s,
            limits=limits,
        )
        self._agent = agent
        self._hub = reader_hub(agent, loaded.pool, node=node, callbacks=self.puller.callbacks, limits=limits)
        self.puller.wire(self._hub)

    @property
    def counters(self) -> tuple[Counters, ...]:
        """What was fetched, and how the hand-offs of it went."""
        return self.puller.counters, self._hub.counters

    def serve_on(self, server: aio.Server) -> None:
        """Add what the nodes that are pulled from call."""
        hub_servicer.add_to_server(self._hub, server)

    def start(self, endpoint: str) -> None:
        """Begin; `endpoint` is where they call it."""
        self._hub.endpoint = endpoint
        settings = self._settings
        watch = watch_writers(
            self._hub, index_url=settings.index_url, fleet=settings.fleet, period_s=settings.heartbeat_s
        )
        self._tasks = [keep(self.puller.keep_time(), name="time of pulls"), keep(watch, name="writer watch")]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        end_hub(self._agent, self._hub)
