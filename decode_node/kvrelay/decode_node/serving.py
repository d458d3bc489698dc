"""A decode node as a whole: wires node, hand-off hub, step thread, lease thread, registry and index together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from kvrelay.core import telemetry
from kvrelay.core.address import advertised
from kvrelay.core.clock import monotonic
from kvrelay.core.drain import DrainRequests
from kvrelay.core.health import ProgressWatch
from kvrelay.core.supervise import keep
from kvrelay.core.types import Incarnation, LinkState, Role
from kvrelay.decode_node.admission import PageBook
from kvrelay.decode_node.engine import DecodeEngine
from kvrelay.decode_node.intake import Limits
from kvrelay.decode_node.lease import LeaseThread
from kvrelay.decode_node.node import DecodeNode
from kvrelay.decode_node.presence import Presence
from kvrelay.decode_node.published_cost import cost_of
from kvrelay.decode_node.pusher import Pusher
from kvrelay.decode_node.runner import StepThread
from kvrelay.decode_node.servicer import DecodeServicer
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.decode_node.stats import node_stats
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.writer import PrefixWriter
from kvrelay.kv_transfer import local
from kvrelay.kv_transfer.hub_values import HubCallbacks
from kvrelay.kv_transfer.link_records import add_links, links_by_peer
from kvrelay.kv_transfer.pool_agent import PoolAgent, end_hub, reader_hub
from kvrelay.kv_transfer.push_servicer import PushServicer
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.model.loaded import Loaded
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.node_metrics import NodeMetrics
from kvrelay.proto.server import Server, node_security
from kvrelay.proto.server import serve as serve_grpc
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc, fleet_pb2

log = logging.getLogger(__name__)
_DRAIN_CHECK_S = 0.05
_STOP_GRACE_S = 1.0


class DecodeServer:
    """A running node. Create and start it on the event loop that it is to live on."""

    def __init__(
        self, settings: DecodeSettings, loaded: Loaded, incarnation: Incarnation, agent: PoolAgent, asked: DrainRequests
    ) -> None:
        """
        Args:
            agent: of the pool, see `start_decode_agent`; the node does not stop it.
            asked: where others ask for a drain; carrying it out is the caller's.
        """
        loop = asyncio.get_running_loop()
        layout, config = loaded.pool.layout, loaded.model.config
        self._agent, self._asked = agent, asked
        self._settings = settings
        self._tls = Tls.load(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)
        self._loaded = loaded
        book = PageBook(
            num_pages=loaded.pool.num_pages, page_tokens=layout.page_tokens, block_tokens=layout.block_tokens
        )
        self._writer = PrefixWriter(
            settings.index_url,
            settings.fleet,
            node=incarnation,
            role=Role.DECODE,
            all_hashes=book.cached_hashes,
        )
        self.node = DecodeNode(
            incarnation=incarnation,
            layout=layout,
            limits=Limits(
                config.max_model_len,
                config.vocab_size,
                config.cache_window_tokens,
                local_tokens=settings.local_prefill_tokens,
            ),
            book=book,
            publisher=self._writer,
            max_requests=settings.max_requests,
            lease_s=settings.lease_s,
        )
        self.engine = DecodeEngine(loaded.model, loaded.pool, max_batch=settings.max_batch)
        self._steps = StepThread(
            self.engine,
            max_batch=settings.max_batch,
            loop=loop,
            on_report=self.node.on_report,
            local_pause_s=settings.local_prefill_pause_ms / 1000,
            step_floor_s=settings.step_floor_ms / 1000,
        )
        self._hub = self._reader_hub(loop)
        self.node.wire(hub=self._hub, steps=self._steps)
        self._pusher = Pusher(
            node=incarnation,
            book=book,
            pool=loaded.pool,
            thread=agent.transfer,
            limits=local.Limits(
                fence_timeout_s=settings.fence_timeout_s, max_message_bytes=settings.max_message_bytes, tls=self._tls
            ),
            max_pushes=settings.max_requests,
        )
        self._presence = Presence(
            NodeRegistry(settings.index_url, settings.fleet),
            record=self._record,
            writers=self._hub.open_writers,
            on_writer_replaced=self._hub.writer_dead,
            on_replaced=asked.ask,
            heartbeat_s=settings.heartbeat_s,
        )
        self._lease = LeaseThread(loop, self._tick)
        threads = {"step": self._steps.stuck_s, "transfer": agent.transfer.stuck_s, "lease": self._lease.stuck_s}
        self._progress = ProgressWatch(threads, limit_s=settings.stuck_after_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: Server
        self._advertised: str
        self._metrics: telemetry.MetricsEndpoint | None = None

    def _reader_hub(self, loop: asyncio.AbstractEventLoop) -> ReaderHub:
        settings, node, agent = self._settings, self.node, self._agent

        def on_fatal() -> None:
            loop.call_soon_threadsafe(node.crash, "transfer thread")

        agent.on_fatal = on_fatal
        callbacks = HubCallbacks(
            on_admitted=node.on_admitted,
            on_failed=node.on_failed,
            on_pages_free=node.on_free,
            on_quarantined=node.on_quarantined,
            on_landed=self._steps.keep_awake,
        )
        limits = local.Limits(fence_timeout_s=settings.fence_timeout_s, max_message_bytes=settings.max_message_bytes)
        return reader_hub(agent, self._loaded.pool, node=node.incarnation, callbacks=callbacks, limits=limits)

    async def start(self) -> None:
        """Serve, and enter the registry.

        Raises:
            SettingsError: the address cannot be bound.
        """
        self.engine.warm_up(prompts=self._settings.local_prefill_tokens > 0)
        servicer = DecodeServicer(
            self.node,
            self._hub,
            lease_s=self._settings.lease_s,
            max_request_s=self._settings.max_request_s,
            drain=self._asked.ask,
            stats=self.stats,
        )
        pushes = PushServicer(
            self._pusher.push,
            node=self.node.incarnation,
            ring_size=1,
            layout=self._loaded.pool.layout,
            max_push_s=self._settings.max_request_s,
            is_draining=lambda: self.node.draining,
        )

        def add_services(server: aio.Server) -> None:
            decode_pb2_grpc.add_DecodeNodeServicer_to_server(servicer, server)
            blocks_pb2_grpc.add_BlockSourceServicer_to_server(pushes, server)

        self._server = await serve_grpc(
            listen=self._settings.listen,
            add_services=add_services,
            services=[
                decode_pb2.DESCRIPTOR.services_by_name["DecodeNode"],
                blocks_pb2.DESCRIPTOR.services_by_name["BlockSource"],
            ],
            max_message_bytes=self._settings.max_message_bytes,
            **node_security(self._tls, lambda reason: self.node.counters.add(f"calls_refused_{reason}_total")),
        )
        self._advertised = advertised(
            bound=self._server.endpoint, advertise=self._settings.advertise, index_url=self._settings.index_url
        )
        self._hub.endpoint = self.endpoint
        registry = CollectorRegistry()
        registry.register(NodeMetrics(Role.DECODE, self._stats_now, asyncio.get_running_loop(), links=self._links))
        self._metrics = telemetry.serve(self._settings.metrics_listen, registry)
        self._steps.start()
        self._lease.start()
        await self._writer.start()
        await self._server.set_serving(True)
        await self._presence.enter()
        self._start_task(self._presence.run(), "presence")
        self._start_task(self._progress.run(self._on_progress_change), "progress watch")

    @property
    def endpoint(self) -> str:
        """host:port that others are told."""
        return self._advertised

    @property
    def active_requests(self) -> int:
        return self.node.records.num_active

    async def drained(self) -> None:
        """Tell the routers, take nothing new once they know, and wait until everything here has ended."""
        self.node.leaving = True
        self._presence.hurry()
        await asyncio.sleep(self._settings.lame_duck_s)
        self.node.draining = True
        while not self.node.is_drained or self._pusher.num_active:  # noqa: ASYNC110 - many events lead there; they need not all know
            await asyncio.sleep(_DRAIN_CHECK_S)

    @property
    def why_not_elsewhere(self) -> str:
        """Return why the pool of this drained node cannot be used otherwise; nothing when it can."""
        if held := self.node.book.account().quarantined:
            return f"{held} pages are in quarantine: a writer that nobody hears of may still reach them"
        return "" if self._agent.transfer.is_idle else "a writer may still reach its pages"

    def serve_again(self) -> None:
        """Take new requests again after `drained`."""
        self.node.leaving = self.node.draining = False
        self._presence.hurry()

    async def stop(self) -> None:
        """End all threads but the agent's, and leave the fleet."""
        self._lease.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        await self._presence.leave(self.node.incarnation)
        await self._writer.stop()
        await asyncio.to_thread(self._steps.stop)  # not the last: its helper thread lets go of it a moment later
        await self._server.stop(_STOP_GRACE_S)
        end_hub(self._agent, self._hub)

    def stats(self) -> common_pb2.NodeStats:
        return node_stats(
            self.node,
            sessions=self._hub.stats().sessions,
            counters=tuple(
                part.counters.values for part in (self._hub, self._agent.transfer, self._writer, self._pusher)
            ),
        )

    async def _stats_now(self) -> common_pb2.NodeStats:
        return self.stats()

    def _links(self) -> dict[str, LinkState]:
        return links_by_peer(self._agent.transfer.links())

    def _tick(self) -> None:
        self.node.tick()
        self._hub.tick()

    async def _on_progress_change(self) -> None:
        self._presence.hurry()
        await self._server.set_serving(self._progress.stuck is None)

    def _record(self) -> fleet_pb2.NodeRecord | None:
        """Return what the registry should say; nothing while the node is stuck, so that nobody is sent here."""
        if self._progress.stuck is not None:
            return None
        layout, node = self._loaded.pool.layout, self.node
        record = fleet_pb2.NodeRecord(
            node=incarnation_to_pb(node.incarnation),
            role=fleet_pb2.NODE_ROLE_DECODE,
            endpoint=self.endpoint,
            ring_size=1,
            layout_fingerprint=layout.fingerprint,
            model=Path(self._settings.model).resolve().name,
            model_id=layout.model_id,
            dtype=layout.dtype,
            latent_format=layout.latent_format,
            max_model_len=self._loaded.model.config.max_model_len,
            block_tokens=layout.block_tokens,
            page_tokens=layout.page_tokens,
            draining=node.leaving,
            total_pages=self._loaded.pool.num_pages,
            free_pages=node.book.free_pages,
            active_requests=node.records.num_active,
            queued_tokens=node.records.num_running,
            cost=cost_of(self._steps.step_times.fitted, self._steps.chunk_times.fitted, now_s=monotonic()),
            local_tokens=self._settings.local_prefill_tokens,
            max_batch=self._settings.max_batch,
        )
        add_links(record, self._agent.transfer.links(), token_bytes=layout.row_bytes_all_layers)
        return record

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = keep(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
