"""Rank 0 as a node: wires control, leader, servicer, leases, registry and index together, and takes them down again."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpc import aio
from prometheus_client import CollectorRegistry

from kvrelay.core import telemetry
from kvrelay.core.address import advertised
from kvrelay.core.drain import DrainRequests
from kvrelay.core.health import ProgressWatch
from kvrelay.core.lifecycle import Ending, announce_ready
from kvrelay.core.supervise import keep, watch_loop
from kvrelay.core.types import Counters, Incarnation, Role
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.pool_agent import PoolAgent
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.group import RingGroup
from kvrelay.prefill_node.health import StepProgress
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.leases import Leases
from kvrelay.prefill_node.pages import RingPages
from kvrelay.prefill_node.published import Published
from kvrelay.prefill_node.published_cost import add_measured
from kvrelay.prefill_node.pulls import Pulls
from kvrelay.prefill_node.rank import TRANSFER_STUCK
from kvrelay.prefill_node.registration import LeaseThread
from kvrelay.prefill_node.servicer import NodeFacts, PrefillServicer
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.prefill_node.wiring import align_tokens, rank_worker
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.node_metrics import NodeMetrics
from kvrelay.proto.server import Server, node_security
from kvrelay.proto.server import serve as serve_grpc
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import fleet_pb2, prefill_pb2, prefill_pb2_grpc

_DRAIN_CHECK_S = 0.05
_REGISTER_WAIT_S = 2.0
_STOP_GRACE_S = 1.0
_IDLE_WAIT_S = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankInfo:
    num_pages: int


@dataclass(frozen=True, slots=True)
class RingStart:
    """A ring whose ranks have found each other."""

    group: RingGroup | None  # None for a ring of one
    node: Incarnation
    ranks: list[RankInfo]
    agent: PoolAgent  # of rank 0


async def serve(
    settings: PrefillSettings,
    loaded: Loaded,
    ring: RingStart,
    asked: DrainRequests,
    *,
    start_step_thread: Callable[[Callable[[], None], Callable[[], object]], threading.Thread],
    die: Callable[[str], None],
    stopping: threading.Event,
) -> Ending:
    """Serve until a stop signal or a drain, finish what runs, and return how it ended; the agent goes on.

    Args:
        start_step_thread: runs (body, on_end) on the step thread; a failure of the body ends the process.
        die: ends the process at once.
        stopping: set before the other ranks are told to exit.
    """
    tls = Tls.load(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)
    loop = asyncio.get_running_loop()
    watch_loop(loop, die)
    step_ended, transfer, node = asyncio.Event(), ring.agent.transfer, ring.node
    published = Published(index_url=settings.index_url, fleet=settings.fleet, node=node)
    ring.agent.on_fatal = partial(die, "the transfer thread died")
    counters = Counters()
    worker = rank_worker(
        loaded, settings, ring.group, transfer, node, loop, wake=lambda: leader.wake(), counters=counters,  # noqa: PLW0108 - made below
    )  # fmt: skip
    layout = loaded.pool.layout
    leader = Leader(
        _control(settings, loaded, ring.ranks),
        worker,
        ring.group,
        token_bytes=layout.row_bytes * layout.num_layers,
        on_cache=lambda change: loop.call_soon_threadsafe(published.apply, change),
        counters=counters,
    )
    leases = Leases(lease_s=settings.lease_s, on_expired=leader.cancel)
    config = loaded.model.config
    facts = NodeFacts(
        incarnation=node,
        layout=layout,
        ring_size=len(ring.ranks),
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        cache_window_tokens=config.cache_window_tokens,
        max_request_s=settings.max_request_s,
    )
    pulls = None
    if ring.group is None and settings.pull_timeout_s:
        pulls = Pulls(settings, loaded, node, ring.agent, on_step=leader.call)
    servicer = PrefillServicer(
        facts,
        leader,
        leases,
        counters=(published.counters,),
        on_drain=asked.ask,
        puller=pulls.puller if pulls else None,
    )
    start_step_thread(leader.run, lambda: loop.call_soon_threadsafe(step_ended.set))
    server = await serve_grpc(
        listen=settings.listen,
        add_services=lambda grpc_server: _add_services(grpc_server, servicer, pulls),
        services=[prefill_pb2.DESCRIPTOR.services_by_name["PrefillNode"]],
        max_message_bytes=settings.max_message_bytes,
        **node_security(tls, lambda reason: published.counters.add(f"calls_refused_{reason}_total")),
    )
    endpoint = advertised(bound=server.endpoint, advertise=settings.advertise, index_url=settings.index_url)
    if pulls is not None:
        pulls.start(endpoint)

    def record() -> fleet_pb2.NodeRecord | None:
        if progress.stuck is not None:
            return None  # so that nobody is sent here
        now = _record(settings, facts, leader, servicer, endpoint, sum(rank.num_pages for rank in ring.ranks))
        now.pulls = pulls is not None
        chunk_tokens = settings.chunk_tokens_on(loaded.device.type)
        add_measured(now, leader.chunk_times.fitted, transfer.links(), chunk_tokens=chunk_tokens, layout=layout)
        return now

    registration = LeaseThread(
        leases,
        node,
        index_url=settings.index_url,
        fleet=settings.fleet,
        heartbeat_s=settings.heartbeat_s,
        record=record,
        on_replaced=lambda: loop.call_soon_threadsafe(asked.ask),
    )
    progress = _progress(leader, transfer, registration, limit_s=settings.stuck_after_s)
    registry = CollectorRegistry()
    registry.register(NodeMetrics(Role.PREFILL, servicer.stats, loop, links=transfer.links))
    metrics = telemetry.serve(settings.metrics_listen, registry)
    await published.start()
    await server.set_serving(True)
    await asyncio.to_thread(registration.start, wait_s=_REGISTER_WAIT_S)

    async def on_progress_change() -> None:
        registration.beat_now()
        await server.set_serving(progress.stuck is None)

    health = keep(progress.run(on_progress_change), name="progress watch")
    announce_ready(endpoint=endpoint, name=node.name)

    ending = await _drained_for(asked, settings, leader, servicer, registration, transfer)
    stopping.set()
    leader.shut_down()
    await step_ended.wait()
    health.cancel()
    await _end(pulls, metrics, registration, published, server)
    return ending


async def _end(
    pulls: Pulls | None,
    metrics: telemetry.MetricsEndpoint | None,
    registration: LeaseThread,
    published: Published,
    server: Server,
) -> None:
    """Stop everything but the step thread, which has ended, and the agent."""
    if pulls is not None:
        pulls.stop()
    if metrics is not None:
        await asyncio.to_thread(metrics.stop)
    await asyncio.to_thread(registration.stop)
    await published.stop()
    await server.stop(_STOP_GRACE_S)


def _add_services(server: aio.Server, servicer: PrefillServicer, pulls: Pulls | None) -> None:
    prefill_pb2_grpc.add_PrefillNodeServicer_to_server(servicer, server)
    if pulls is not None:
        pulls.serve_on(server)


def _progress(leader: Leader, transfer: TransferThread, registration: LeaseThread, *, limit_s: float) -> ProgressWatch:
    steps = StepProgress(mark=leader.progress_mark, has_work=lambda: leader.load.has_work)

    def others_stuck_s() -> float:
        return max((counters.get(TRANSFER_STUCK, 0.0) for counters in leader.rank_counters[1:]), default=0.0)

    threads = {"step": steps.stuck_s, "transfer": transfer.stuck_s, "lease": registration.stuck_s}
    return ProgressWatch(threads | {"transfer (of a further rank)": others_stuck_s}, limit_s=limit_s)


def _control(settings: PrefillSettings, loaded: Loaded, ranks: list[RankInfo]) -> RingControl:
    chunk_tokens = settings.chunk_tokens_on(loaded.device.type)
    layout = loaded.pool.layout
    pages = RingPages(
        pages_per_rank=[rank.num_pages for rank in ranks],
        page_tokens=layout.page_tokens,
        block_tokens=layout.block_tokens,
        chunk_tokens=chunk_tokens,
        align_tokens=align_tokens(loaded.device),
    )
    return RingControl(
        pages,
        block_tokens=layout.block_tokens,
        chunk_tokens=chunk_tokens,
        max_jobs=settings.max_queued_requests,
        prefix_wait_s=settings.prefix_wait_s,
    )


def _record(
    settings: PrefillSettings,
    facts: NodeFacts,
    leader: Leader,
    servicer: PrefillServicer,
    endpoint: str,
    total_pages: int,
) -> fleet_pb2.NodeRecord:
    layout, load = facts.layout, leader.load
    return fleet_pb2.NodeRecord(
        node=incarnation_to_pb(facts.incarnation),
        role=fleet_pb2.NODE_ROLE_PREFILL,
        endpoint=endpoint,
        ring_size=facts.ring_size,
        layout_fingerprint=layout.fingerprint,
        model=Path(settings.model).resolve().name,
        model_id=layout.model_id,
        dtype=layout.dtype,
        max_model_len=facts.max_model_len,
        block_tokens=layout.block_tokens,
        page_tokens=layout.page_tokens,
        draining=servicer.leaving,
        total_pages=total_pages,
        free_pages=load.free_pages,
        active_requests=load.active_jobs,
        queued_tokens=load.queued_tokens,
    )


async def _drained_for(
    asked: DrainRequests,
    settings: PrefillSettings,
    leader: Leader,
    servicer: PrefillServicer,
    registration: LeaseThread,
    transfer: TransferThread,
) -> Ending:
    """Wait until a drain is asked for and has come to its end; return what follows."""
    while True:
        await asked.wait()
        await _said_goodbye(servicer, registration, lame_duck_s=settings.lame_duck_s)
        await _drained(leader, servicer, closing_limit_s=settings.fence_timeout_s + _STOP_GRACE_S)
        if asked.ending is Ending.LEAVES or await _came_to_rest(lambda: leader.load.is_empty and transfer.is_idle):
            return asked.ending
        log.error("this node keeps its role: a hand-off or a pull has no end yet, so its pages may still be used")
        asked.role_decided()
        servicer.leaving = servicer.draining = False
        registration.beat_now()


async def _came_to_rest(is_idle: Callable[[], bool], *, within_s: float = _IDLE_WAIT_S) -> bool:
    """Wait for what needs a moment only: the data plane lets go of a hand-off, or of a pull, after its request."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while not is_idle() and loop.time() < until_s:  # noqa: ASYNC110 - two threads lead there
        await asyncio.sleep(_DRAIN_CHECK_S)
    return is_idle()


async def _said_goodbye(servicer: PrefillServicer, registration: LeaseThread, *, lame_duck_s: float) -> None:
    """Tell the registry, and refuse new work once every router has read it."""
    servicer.leaving = True
    registration.beat_now()
    await asyncio.sleep(lame_duck_s)
    servicer.draining = True


async def _drained(leader: Leader, servicer: PrefillServicer, *, closing_limit_s: float) -> None:
    """Wait until no request runs and no page is held by a hand-off; a stuck hand-off is waited for in bounds."""
    loop = asyncio.get_running_loop()
    busy_until_s = loop.time()
    while loop.time() < busy_until_s + closing_limit_s:
        jobs: asyncio.Future[int] = loop.create_future()
        leader.call(partial(_count_jobs, loop, jobs))
        if not await jobs and not servicer.active_requests:
            return
        if servicer.active_requests:
            busy_until_s = loop.time()
        await asyncio.sleep(_DRAIN_CHECK_S)


def _count_jobs(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[int], control: RingControl) -> None:
    loop.call_soon_threadsafe(answer.set_result, control.active_jobs + control.closing_jobs)
