"""A ring as rank 0 leads it: what plans, what computes, and the thread between them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, Incarnation
from kvrelay.kv_transfer.pool_agent import PoolAgent
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.group import RingGroup
from kvrelay.prefill_node.host_price import load_pays, load_token_s
from kvrelay.prefill_node.leader import CacheListener, Leader
from kvrelay.prefill_node.pages import RingPages
from kvrelay.prefill_node.pulls import Pulls
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.prefill_node.wiring import align_tokens, rank_host_pages, rank_worker


@dataclass(frozen=True, slots=True)
class RingStart:
    """A ring whose ranks have found each other."""

    group: RingGroup | None  # None for a ring of one
    node: Incarnation
    pages_per_rank: list[int]
    agent: PoolAgent  # of rank 0
    stopping: threading.Event = field(default_factory=threading.Event)  # set before the other ranks are told to exit


def led_ring(
    settings: PrefillSettings,
    loaded: Loaded,
    ring: RingStart,
    loop: asyncio.AbstractEventLoop,
    *,
    pulls: Pulls | None,
    on_cache: CacheListener,
) -> tuple[Leader, tuple[Counters, ...]]:
    """Return the leader of a ring, not running yet, and what its host memory counts.

    Args:
        pulls: rank 0's part of what is fetched from other nodes; None: nothing is.
        on_cache: told on the step thread of every change of the prefix cache.
    """
    counters, layout = Counters(), loaded.pool.layout
    worker = rank_worker(
        loaded, settings, ring.group, ring.agent.transfer, ring.node, loop,
        wake=lambda: leader.wake(), counters=counters,  # noqa: PLW0108 - made below
    )  # fmt: skip
    if pulls is not None:
        worker.fetch_by(pulls.fetcher, pulls.counters)
    chunk_tokens = settings.chunk_tokens_on(loaded.device.type)

    def pays(tokens: Span) -> bool:
        token_s = host_token_s(leader, layout)
        return load_pays(tokens, leader.chunk_times.fitted, token_s=token_s, chunk_tokens=chunk_tokens)

    control = _control(settings, loaded, ring.pages_per_rank)
    control.admission.load_pays = pays
    leader = Leader(
        control,
        worker,
        ring.group,
        token_bytes=layout.row_bytes_all_layers,
        on_cache=on_cache,
        counters=counters,
        give_way_s=settings.give_way_ms / 1e3,
    )
    return leader, tuple(control.host_counters)


def host_token_s(leader: Leader, layout: PageLayout) -> float:
    """Return what loading one token from host memory takes, as measured; 0 = not known yet."""
    return load_token_s(leader.rank_counters, token_bytes=layout.row_bytes_all_layers)


def _control(settings: PrefillSettings, loaded: Loaded, pages_per_rank: list[int]) -> RingControl:
    chunk_tokens = settings.chunk_tokens_on(loaded.device.type)
    layout = loaded.pool.layout
    host_pages = rank_host_pages(settings, loaded)
    pages = RingPages(
        pages_per_rank=pages_per_rank,
        page_tokens=layout.page_tokens,
        block_tokens=layout.block_tokens,
        chunk_tokens=chunk_tokens,
        align_tokens=align_tokens(loaded.device),
        host_pages_per_rank=[host_pages] * len(pages_per_rank) if host_pages else (),
        page_bytes=layout.page_bytes_all_layers,
    )
    return RingControl(
        pages,
        block_tokens=layout.block_tokens,
        chunk_tokens=chunk_tokens,
        max_jobs=settings.max_queued_requests,
        prefix_wait_s=settings.prefix_wait_s,
    )
