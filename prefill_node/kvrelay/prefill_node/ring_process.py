"""A process of a prefill ring: rank 0 starts the other ranks, serves gRPC and leads; every other rank follows.

Threads of a rank: asyncio (main: gRPC and hand-off streams), step (scheduler and compute), transfer (data plane), and
on rank 0 lease (leases and registry).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import NoReturn

import uvloop
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists it nowhere

from kvrelay.core import otel, pace
from kvrelay.core.drain import DrainRequests
from kvrelay.core.errors import ServeError, SettingsError
from kvrelay.core.lifecycle import StopSignals, die, end_process, new_incarnation, set_up_logging
from kvrelay.core.settings import load
from kvrelay.core.supervise import watch_loop, watch_threads
from kvrelay.core.types import Counters, Incarnation, Role
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node.app import serve
from kvrelay.prefill_node.follower import follow
from kvrelay.prefill_node.follower_pulls import FollowerPulls
from kvrelay.prefill_node.group import RingGroup, form, serve_store, spawn_ranks
from kvrelay.prefill_node.led_ring import RingStart
from kvrelay.prefill_node.pulls import Pulls
from kvrelay.prefill_node.settings import PrefillSettings, RankPlace, rank_place
from kvrelay.prefill_node.step_thread import start_step_thread
from kvrelay.prefill_node.wiring import load_rank, rank_host_pages, rank_worker, start_rank_agent
from kvrelay.proto.convert import incarnation_from_pb, incarnation_to_pb
from kvrelay.proto.v1 import common_pb2, fleet_pb2


def main(argv: Sequence[str]) -> NoReturn:
    """Be one rank of a ring of several until it is told to stop; ends the process.

    Raises:
        ServeError: it cannot start; the message says why.
    """
    settings = load(PrefillSettings, list(argv), prog="kvrelay prefill")
    place = rank_place(settings)
    if place.ring_size < 2:
        raise SettingsError("a ring has two ranks or more; `kvrelay prefill` starts a node of one")
    set_up_logging(settings.log_level, settings.log_format)
    watch_threads(die)
    if place.rank == 0:
        _lead(settings, place, argv)
    else:
        _follow(settings, place)
    # A peer may still be writing into the pool; unmapping it on the way out would crash in the transport's threads.
    end_process(0)


# ---- rank 0 ----


def _lead(settings: PrefillSettings, place: RankPlace, argv: Sequence[str]) -> None:
    store: TCPStore | None = None
    children: list[subprocess.Popen[bytes]] = []
    if place.spawns:
        store = serve_store(ring_size=place.ring_size, timeout_s=settings.start_timeout_s)
        children = spawn_ranks(argv, ring_size=place.ring_size, store_port=store.port)
    stopping = threading.Event()
    for child in children:
        threading.Thread(target=_watch, args=(child, stopping), name="watch", daemon=True).start()
    loaded = load_rank(settings, place)
    node = new_incarnation(settings.name, Role.PREFILL)
    otel.export(settings.trace_exporter, service=node.name)
    group = form(
        place, loaded.device, store=store,
        group_timeout_s=settings.group_timeout_s, start_timeout_s=settings.start_timeout_s,
    )  # fmt: skip
    pages_per_rank = [loaded.pool.num_pages, *_meet_as_leader(group, node, loaded, settings)]
    uvloop.run(_serve(settings, loaded, group, node, pages_per_rank, stopping))
    for child in children:
        child.wait(settings.group_timeout_s)


def _watch(child: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    status = child.wait()
    if not stopping.is_set():
        die(f"rank process {child.pid} ended with status {status}")


def _meet_as_leader(group: RingGroup, node: Incarnation, loaded: Loaded, settings: PrefillSettings) -> list[int]:
    """Tell the other ranks whose node they are, and return how many pages each of them has.

    Raises:
        ServeError: a rank has loaded another model, or has other room in host memory.
    """
    group.broadcast(incarnation_to_pb(node).SerializeToString())
    records = [fleet_pb2.NodeRecord.FromString(message) for message in group.gather()]
    for rank, record in enumerate(records, start=1):
        if record.layout_fingerprint != loaded.pool.layout.fingerprint:
            raise ServeError(f"rank {rank} has layout {record.layout_fingerprint.hex()}; do all hosts have one model?")
        if record.host_pages != rank_host_pages(settings, loaded):
            raise ServeError(f"rank {rank} has {record.host_pages} host pages; is --host-cache-gib equal everywhere?")
    return [record.total_pages for record in records]


async def _serve(
    settings: PrefillSettings,
    loaded: Loaded,
    group: RingGroup,
    node: Incarnation,
    pages_per_rank: list[int],
    stopping: threading.Event,
) -> None:
    asked = DrainRequests(
        StopSignals(asyncio.get_running_loop()),
        why_no_switch=f"this is a ring of {group.size} ranks; only a node of one rank can change its role",
    )
    agent = start_rank_agent(loaded, settings, node, 0, on_fatal=lambda: die("the transfer thread died"))
    await serve(settings, loaded, RingStart(group, node, pages_per_rank, agent, stopping), asked)


# ---- every other rank ----


def _follow(settings: PrefillSettings, place: RankPlace) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 says when the ring ends
    uvloop.run(_obey(settings, place))


async def _obey(settings: PrefillSettings, place: RankPlace) -> None:
    loaded = load_rank(settings, place)
    group = form(
        place, loaded.device, store=None,
        group_timeout_s=settings.group_timeout_s, start_timeout_s=settings.start_timeout_s,
    )  # fmt: skip
    node = _meet_as_follower(group, loaded, settings)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    watch_loop(loop, die)
    agent = start_rank_agent(loaded, settings, node, place.rank, on_fatal=lambda: die("the transfer thread died"))
    worker = rank_worker(loaded, settings, group, agent.transfer, node, loop, wake=lambda: None, counters=Counters())
    pulls: FollowerPulls | None = None
    if settings.pull_timeout_s:
        # What comes of fetches is told with each step, and rank 0 steps while there are any.
        own = Pulls(settings, loaded, node, place.rank, agent, wake=lambda: None)
        pulls = await FollowerPulls.start(settings, own)
        worker.fetch_by(own.fetcher, own.counters)
    with pace.serving():
        start_step_thread(lambda: follow(worker, group), lambda: loop.call_soon_threadsafe(ended.set))
        pace.settle()
        await ended.wait()
    if pulls is not None:
        await pulls.stop()


def _meet_as_follower(group: RingGroup, loaded: Loaded, settings: PrefillSettings) -> Incarnation:
    node = incarnation_from_pb(common_pb2.Incarnation.FromString(group.receive()))
    record = fleet_pb2.NodeRecord(
        total_pages=loaded.pool.num_pages,
        layout_fingerprint=loaded.pool.layout.fingerprint,
        host_pages=rank_host_pages(settings, loaded),
    )
    group.send_to_leader(record.SerializeToString())
    return node
