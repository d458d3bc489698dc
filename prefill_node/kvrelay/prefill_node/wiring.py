"""How one rank process, once it has loaded, is connected: its transfer thread, and the worker over everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from kvrelay.core.types import Counters, Incarnation
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.pool_agent import GPU_STAGING_BYTES, PoolAgent, start_agent
from kvrelay.kv_transfer.values import MAX_RING_SIZE
from kvrelay.kvcache.host_store import HostStore, host_pages
from kvrelay.model.loaded import Loaded
from kvrelay.model.prefill_step import warm_up
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.group import RingGroup
from kvrelay.prefill_node.handoff import WriterOpener
from kvrelay.prefill_node.host_copier import HostCopier
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.ring import Ring
from kvrelay.prefill_node.settings import PrefillSettings, RankPlace
from kvrelay.proto.tls import Tls


def load_rank(settings: PrefillSettings, place: RankPlace) -> Loaded:
    """Load this rank's model and allocate its pool, on a GPU with room to pack what leaves scattered, and warm up."""
    loaded = Loaded.load(
        settings, local_rank=place.local_rank, num_ranks=place.ring_size, gpu_staging_bytes=GPU_STAGING_BYTES
    )
    if loaded.device.type == "cuda":
        loaded.pool.bind_thread()
        warm_up(loaded.model)
    return loaded


def align_tokens(device: torch.device) -> int:
    """Return where spans of a chunk may be cut: at pages on GPUs, anywhere on CPUs."""
    return 64 if device.type == "cuda" else 1


def start_rank_agent(
    loaded: Loaded, settings: PrefillSettings, node: Incarnation, rank: int, *, on_fatal: Callable[[], None]
) -> PoolAgent:
    """Start this rank's agent of the data plane, with the fence cells of what is pulled here.

    Raises:
        TransferError: the transport does not start.
    """
    # A slot outlives its pull for as long as a fence is missing.
    num_cells = (2 * settings.max_queued_requests if settings.pull_timeout_s else 1) * MAX_RING_SIZE
    return start_agent(loaded.pool, settings, node=node, rank=rank, num_cells=num_cells, on_fatal=on_fatal)


def rank_host_pages(settings: PrefillSettings, loaded: Loaded) -> int:
    """Return the pages of host memory behind each rank's pool; 0 = there is none.

    Raises:
        SettingsError: what is given does not hold one page.
    """
    return host_pages(loaded.pool.layout, gib=settings.host_cache_gib)


def transfer_limits(settings: PrefillSettings) -> Limits:
    return Limits(
        fence_timeout_s=settings.fence_timeout_s,
        max_message_bytes=settings.max_message_bytes,
        tls=Tls.load(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key),
    )


def rank_worker(
    loaded: Loaded,
    settings: PrefillSettings,
    group: RingGroup | None,
    transfer: TransferThread,
    node: Incarnation,
    loop: asyncio.AbstractEventLoop,
    *,
    wake: Callable[[], None],
    counters: Counters,
) -> RankWorker:
    """Return the worker of this rank; `wake` is called when a hand-off has moved on, or a copy has ended.

    Raises:
        SettingsError, CapacityError: the host memory wanted cannot be had.
    """
    ring = Ring(group, loaded.pool, counters)
    opener = WriterOpener(
        transfer=transfer,
        pool=loaded.pool,
        node=node,
        rank=ring.rank,
        loop=loop,
        limits=transfer_limits(settings),
        wake=wake,
    )
    planner = ChunkPlanner(
        rank=ring.rank,
        ring_size=ring.size,
        align_tokens=align_tokens(loaded.device),
        ring_block_tokens=settings.ring_block_tokens_on(loaded.device.type),
        device=loaded.device,
    )
    of_copies = Counters()
    worker = RankWorker(
        loaded.model, loaded.pool, ring, open_writer=opener, planner=planner, counters=counters,
        more_counters=(transfer.counters, opener.counters, of_copies), transfer_stuck_s=transfer.stuck_s,
    )  # fmt: skip
    if num_pages := rank_host_pages(settings, loaded):
        worker.copier = HostCopier(HostStore(loaded.pool, num_pages), counters=of_copies, wake=wake)
    return worker
