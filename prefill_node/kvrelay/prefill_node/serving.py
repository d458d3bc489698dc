"""Rank 0 as a node: wires leader, servicer, leases, registry and index together, and takes them down again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from grpc import aio
from prometheus_client import CollectorRegistry

from kvrelay.core import telemetry
from kvrelay.core.address import advertised
from kvrelay.core.drain import DrainRequests
from kvrelay.core.health import ProgressWatch
from kvrelay.core.supervise import keep
from kvrelay.core.types import LinkState, Role
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.link_records import links_by_peer
from kvrelay.kv_transfer.push_servicer import PushServicer
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.health import StepProgress
from kvrelay.prefill_node.intake import NodeFacts
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.leases import Leases
from kvrelay.prefill_node.led_ring import RingStart, host_token_s, led_ring
from kvrelay.prefill_node.published import Published
from kvrelay.prefill_node.published_cost import add_measured
from kvrelay.prefill_node.pull_servicer import PullServicer
from kvrelay.prefill_node.puller import Puller
from kvrelay.prefill_node.pulls import Pulls
from kvrelay.prefill_node.rank import TRANSFER_STUCK
from kvrelay.prefill_node.registration import LeaseThread
from kvrelay.prefill_node.ring_pusher import RingPusher
from kvrelay.prefill_node.servicer import PrefillServicer
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.prefill_node.step_answer import answer_of
from kvrelay.prefill_node.step_thread import start_step_thread
from kvrelay.prefill_node.wiring import rank_host_pages
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.node_metrics import NodeMetrics
from kvrelay.proto.server import Server, node_security
from kvrelay.proto.server import serve as serve_grpc
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import blocks_pb2, blocks_pb2_grpc, decode_pb2_grpc, fleet_pb2, prefill_pb2, prefill_pb2_grpc

_DRAIN_CHECK_S = 0.05
_REGISTER_WAIT_S = 2.0
_STOP_GRACE_S = 1.0
log = logging.getLogger(__name__)


class PrefillServer:
    """A running node. Create and start it on the event loop that it is to live on."""

    def __init__(self, settings: PrefillSettings, loaded: Loaded, ring: RingStart, asked: DrainRequests) -> None:
        """
        Args:
            ring: the node does not stop its agent.
            asked: where others ask for a drain; carrying it out is the caller's.
        """
        self._settings, self._loaded, self._ring = settings, loaded, ring
        self._tls = Tls.load(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)
        self._loop, self._step_ended = asyncio.get_running_loop(), asyncio.Event()
        self._pulls: Pulls | None = None
        self._puller: Puller | None = None
        if settings.pull_timeout_s:
            self._pulls = Pulls(settings, loaded, ring.node, 0, ring.agent, wake=lambda: self._leader.wake())  # noqa: PLW0108 - made below
        self._published = Published(
            index_url=settings.index_url,
            fleet=settings.fleet,
            node=ring.node,
            has_host_tier=settings.host_cache_gib > 0,
        )
        self._leader, host_counters = led_ring(
            settings,
            loaded,
            ring,
            self._loop,
            pulls=self._pulls,
            on_cache=lambda change: self._loop.call_soon_threadsafe(self._published.apply, change),
        )
        self._leases = Leases(lease_s=settings.lease_s, on_expired=self._leader.cancel)
        if self._pulls is not None:
            layout = loaded.pool.layout
            self._puller = Puller(
                self._leader,
                block_tokens=layout.block_tokens,
                row_bytes=layout.row_bytes_all_layers,
                timeout_s=settings.pull_timeout_s,
            )
        self._pusher = RingPusher(self._leader)
        self._facts = _facts(settings, loaded, ring)
        self._servicer = PrefillServicer(
            self._facts,
            self._leader,
            self._leases,
            counters=(
                self._published.counters,
                self._pusher.counters,
                *([self._puller.counters] if self._puller else []),
                *host_counters,
            ),
            on_drain=asked.ask,
            puller=self._puller,
        )
        self._registration = LeaseThread(
            self._leases,
            ring.node,
            index_url=settings.index_url,
            fleet=settings.fleet,
            heartbeat_s=settings.heartbeat_s,
            record=self._record,
            on_replaced=lambda: self._loop.call_soon_threadsafe(asked.ask),
        )
        self._progress = _progress(
            self._leader, ring.agent.transfer, self._registration, limit_s=settings.stuck_after_s
        )
        self._server: Server
        self._health: asyncio.Task[None]
        self._metrics: telemetry.MetricsEndpoint | None = None
        self.endpoint = ""  # host:port that others are told, once it has started

    async def start(self) -> None:
        """Serve, and enter the registry.

        Raises:
            SettingsError: the address cannot be bound.
        """
        settings = self._settings
        start_step_thread(self._leader.run, lambda: self._loop.call_soon_threadsafe(self._step_ended.set))
        self._server = await serve_grpc(
            listen=settings.listen,
            add_services=self._add_services,
            services=[
                prefill_pb2.DESCRIPTOR.services_by_name["PrefillNode"],
                blocks_pb2.DESCRIPTOR.services_by_name["BlockSource"],
            ],
            max_message_bytes=settings.max_message_bytes,
            **node_security(self._tls, lambda reason: self._published.counters.add(f"calls_refused_{reason}_total")),
        )
        self.endpoint = advertised(
            bound=self._server.endpoint, advertise=settings.advertise, index_url=settings.index_url
        )
        if self._pulls is not None:
            self._pulls.start(self.endpoint)
        registry = CollectorRegistry()
        registry.register(NodeMetrics(Role.PREFILL, self._servicer.stats, self._loop, links=self._links))
        self._metrics = telemetry.serve(settings.metrics_listen, registry)
        await self._published.start()
        await self._server.set_serving(True)
        await asyncio.to_thread(self._registration.start, wait_s=_REGISTER_WAIT_S)
        self._health = keep(self._progress.run(self._on_progress_change), name="progress watch")

    def _add_services(self, server: aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillNodeServicer_to_server(self._servicer, server)
        pushes = PushServicer(
            self._pusher.push,
            node=self._ring.node,
            ring_size=len(self._ring.pages_per_rank),
            layout=self._loaded.pool.layout,
            max_push_s=self._settings.max_request_s,
            is_draining=lambda: self._servicer.draining,
        )
        blocks_pb2_grpc.add_BlockSourceServicer_to_server(pushes, server)
        if self._pulls is not None:
            ring_size = len(self._ring.pages_per_rank)
            servicer = PullServicer(self._pulls.hub, self._leader, ring_size=ring_size)  # type: ignore[abstract]
            decode_pb2_grpc.add_DecodeNodeServicer_to_server(servicer, server)

    @property
    def active_requests(self) -> int:
        return self._servicer.active_requests

    async def drained(self) -> None:
        """Tell the routers, take nothing new once they know, and wait until no request runs and no hand-off holds a
        page; a stuck hand-off is waited for in bounds.
        """
        self._servicer.leaving = True
        self._registration.beat_now()
        await asyncio.sleep(self._settings.lame_duck_s)
        self._servicer.refuse()
        busy_until_s = self._loop.time()
        while self._loop.time() < busy_until_s + self._settings.fence_timeout_s + _STOP_GRACE_S:
            if not await answer_of(self._leader.call, _num_held) and not self.active_requests:
                return
            if self.active_requests:
                busy_until_s = self._loop.time()
            await asyncio.sleep(_DRAIN_CHECK_S)

    @property
    def why_not_elsewhere(self) -> str:
        """Return why the pool of this drained node cannot be used otherwise; nothing when it can."""
        if self._leader.load.is_empty and self._ring.agent.transfer.is_idle:
            return ""
        return "a hand-off or a pull has no end yet, so its pages may still be used"

    def serve_again(self) -> None:
        """Take new requests again after `drained`."""
        self._servicer.leaving = self._servicer.draining = False
        self._registration.beat_now()

    async def stop(self) -> None:
        """Tell the other ranks to exit, end all threads but the agent's, and leave the fleet."""
        self._ring.stopping.set()
        self._leader.shut_down()
        await self._step_ended.wait()
        self._health.cancel()
        if self._pulls is not None:
            self._pulls.stop()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        await asyncio.to_thread(self._registration.stop)
        await self._published.stop()
        self._servicer.refuse()
        await self._server.stop(_STOP_GRACE_S)

    def _links(self) -> dict[str, LinkState]:
        return links_by_peer(self._ring.agent.transfer.links())

    async def _on_progress_change(self) -> None:
        self._registration.beat_now()
        await self._server.set_serving(self._progress.stuck is None)

    def _record(self) -> fleet_pb2.NodeRecord | None:
        """Return what the registry should say; nothing while the node is stuck, so that nobody is sent here."""
        if self._progress.stuck is not None:
            return None
        settings, layout, load = self._settings, self._loaded.pool.layout, self._leader.load
        record = fleet_pb2.NodeRecord(
            node=incarnation_to_pb(self._ring.node),
            role=fleet_pb2.NODE_ROLE_PREFILL,
            endpoint=self.endpoint,
            ring_size=len(self._ring.pages_per_rank),
            layout_fingerprint=layout.fingerprint,
            model=Path(settings.model).resolve().name,
            model_id=layout.model_id,
            dtype=layout.dtype,
            latent_format=layout.latent_format,
            max_model_len=self._loaded.model.config.max_model_len,
            block_tokens=layout.block_tokens,
            page_tokens=layout.page_tokens,
            draining=self._servicer.leaving,
            total_pages=sum(self._ring.pages_per_rank),
            free_pages=load.free_pages,
            active_requests=load.active_jobs,
            queued_tokens=load.queued_tokens,
            pulls=self._pulls is not None,
            takes_late_tickets=self._facts.takes_late_tickets,
            takes_prepared_calls=True,
            chunk_tokens=settings.chunk_tokens_on(self._loaded.device.type),
            host_pages=rank_host_pages(settings, self._loaded),
            host_token_s=host_token_s(self._leader, layout),
        )
        add_measured(
            record,
            self._leader.chunk_times.fitted,
            self._ring.agent.transfer.links(),
            chunk_tokens=settings.chunk_tokens_on(self._loaded.device.type),
            layout=layout,
        )
        return record


def _facts(settings: PrefillSettings, loaded: Loaded, ring: RingStart) -> NodeFacts:
    config = loaded.model.config
    return NodeFacts(
        incarnation=ring.node,
        layout=loaded.pool.layout,
        ring_size=len(ring.pages_per_rank),
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        cache_window_tokens=config.cache_window_tokens,
        max_request_s=settings.max_request_s,
    )


def _progress(leader: Leader, transfer: TransferThread, registration: LeaseThread, *, limit_s: float) -> ProgressWatch:
    steps = StepProgress(mark=leader.progress_mark, has_work=lambda: leader.load.has_work)

    def others_stuck_s() -> float:
        return max((counters.get(TRANSFER_STUCK, 0.0) for counters in leader.rank_counters[1:]), default=0.0)

    threads = {"step": steps.stuck_s, "transfer": transfer.stuck_s, "lease": registration.stuck_s}
    return ProgressWatch(threads | {"transfer (of a further rank)": others_stuck_s}, limit_s=limit_s)


def _num_held(control: RingControl) -> int:
    """Return how many jobs and pushes the step thread has, those included that only wait for their hand-off."""
    return control.active_jobs + control.closing_jobs + len(control.pushes)
