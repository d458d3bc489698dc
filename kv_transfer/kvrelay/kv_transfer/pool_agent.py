"""From a latent pool to the data plane: its bytes as the hand-off sees them, and the agent over it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from kvrelay.core.errors import TransferError
from kvrelay.core.settings import NodeSettings
from kvrelay.core.types import Counters, Incarnation
from kvrelay.kernels.checksum import checksum_ranges
from kvrelay.kernels.pieces import WORD_BYTES
from kvrelay.kernels.triton_support import triton_refuses
from kvrelay.kv_transfer import device_pool
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.cuda_ipc import device_uuid
from kvrelay.kv_transfer.direct import DirectTransport
from kvrelay.kv_transfer.direct_pool import DirectPool, direct_refuses
from kvrelay.kv_transfer.fence_cells import FenceCells, FenceMemory
from kvrelay.kv_transfer.hub_values import HubCallbacks
from kvrelay.kv_transfer.local import DeviceSums, Limits, LocalPool
from kvrelay.kv_transfer.packing import Packer
from kvrelay.kv_transfer.plan import Copy, table_of
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.kv_transfer.self_relay import prove_relay
from kvrelay.kv_transfer.transport import Region, Transport, agent_name
from kvrelay.kv_transfer.ucx_log import is_expected
from kvrelay.kv_transfer.values import ChecksumKind
from kvrelay.kvcache.checksum import pool_checksum, start_pool_checksum
from kvrelay.kvcache.pool import LatentPool

log = logging.getLogger(__name__)

# Staging of a pool on a GPU, for its life as a writer. One layer of 32K tokens of a row of 1,152 bytes is 36 MiB: room
# for several on their way at once.
GPU_STAGING_BYTES = 256 << 20


@dataclass(slots=True)
class PoolAgent:
    """A registered pool's way to the data plane, for as long as its process lives, in whatever role."""

    transfer: TransferThread
    cells: FenceCells
    on_fatal: Callable[[], None]  # called on the agent's thread when it dies of a bug; belongs to who serves now
    last_epoch: int = 0  # the cells keep what was written for earlier reservations, so their numbers never come again


def local_pool(pool: LatentPool) -> LocalPool:
    """Return a pool as endpoints know it; checksums are of the kind that its device does best."""
    layout, num_pages = pool.layout, pool.num_pages
    has_words = layout.row_bytes % WORD_BYTES == 0
    if pool.device.type == "cpu":
        by_words = LocalPool(layout, num_pages, partial(checksum_ranges, pool.memory()), kind=ChecksumKind.WORDS)
        return LocalPool(layout, num_pages, pool_checksum(pool), others=(by_words,) if has_words else ())
    waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums", initializer=pool.bind_thread)
    device = _name_of(pool.device)
    sums_on_host = DeviceSums(start_pool_checksum(pool), waiter)
    on_host = LocalPool(layout, num_pages, pool_checksum(pool), sums_on_host, device=device)
    if not has_words or triton_refuses(pool.device.type) is not None:
        return on_host
    on_device = DeviceSums(device_pool.start_word_sum(pool), waiter)
    summed = LocalPool(
        layout,
        num_pages,
        device_pool.word_sum(pool),
        on_device,
        kind=ChecksumKind.WORDS,
        others=(on_host,),
        device=device,
    )
    summed.checksum([(0, layout.page_bytes)])  # builds the kernel, before anybody waits for it
    return summed


def _name_of(device: torch.device) -> bytes:
    try:
        return device_uuid(device.index)
    except TransferError as err:
        log.info("nobody learns which device this pool is on: %s", err)
        return b""


def reader_hub(
    agent: PoolAgent, pool: LatentPool, *, node: Incarnation, callbacks: HubCallbacks, limits: Limits
) -> ReaderHub:
    """Return a hub for hand-offs into the agent's pool, whose reservations go on from those of earlier roles.

    Its endpoint is to be set before the first reservation, and `end_hub` called after the last.
    """
    hub = ReaderHub(
        node=node,
        endpoint="",
        pool=local_pool(pool),
        cells=agent.cells,
        thread=agent.transfer,
        callbacks=callbacks,
        limits=limits,
    )
    hub.last_epoch = agent.last_epoch
    return hub


def end_hub(agent: PoolAgent, hub: ReaderHub) -> None:
    """Keep what a later role's hub must know."""
    agent.last_epoch = hub.last_epoch


def packer(pool: LatentPool) -> Packer | None:
    """Return what gathers scattered rows in the pool's staging; None where there is none, or nothing to do it with."""
    if pool.staging_bytes == 0 or pool.layout.row_bytes % WORD_BYTES or triton_refuses(pool.device.type) is not None:
        return None
    gather = device_pool.gather_on_device(pool)
    gather(table_of([Copy(0, 0, pool.layout.page_bytes)]), pool.num_bytes)  # builds the kernel
    torch.cuda.synchronize(pool.device)
    return Packer(gather, offset_bytes=pool.num_bytes, num_bytes=pool.staging_bytes)


def with_direct_writes(transport: Transport, pool: LatentPool, *, counters: Counters) -> Transport:
    """Return a transport that writes scattered pieces into mapped pools itself; the same one where this cannot be."""
    if (why := direct_refuses(pool)) is not None:
        log.info("no pages are written directly from this pool: %s", why)
        return transport
    return DirectTransport(transport, DirectPool(pool), counters=counters)


def start_agent(
    pool: LatentPool,
    settings: NodeSettings,
    *,
    node: Incarnation,
    rank: int,
    num_cells: int,
    on_fatal: Callable[[], None],
) -> PoolAgent:
    """Register a pool and `num_cells` fence cells with an agent and start its thread.

    By then one page was relayed through it.

    Raises:
        TransferError: the transport does not start, or does not relay.
    """
    if pool.device.type == "cuda":
        fences = FenceMemory.in_tensor(torch.zeros(num_cells, dtype=torch.int64, device=pool.device))
    else:
        fences = FenceMemory.on_host(num_cells)
    expected = tuple(settings.expected_transports.split(",")) if settings.expected_transports else ()
    device_id = pool.device.index if pool.device.type == "cuda" else -1
    region = Region(pool.address, pool.region_bytes, device_id)

    def make(counters: Counters) -> Transport:
        pool.bind_thread()  # this is the transfer thread: it sums and writes what lies on that device
        from kvrelay.kv_transfer.nixl import NixlTransport  # noqa: PLC0415 - UCX starts threads when it is loaded

        transport = NixlTransport(
            agent_name=agent_name(node, rank),
            pool=region,
            pool_pages=pool.num_pages,
            fences=fences,
            counters=counters,
            net_devices=settings.net_devices,
            tcp_port_range=settings.tcp_port_range,
        )
        _say_own_route(
            transport.address().agent_name, prove_relay(transport, pool), expected, on_device=region.device_id >= 0
        )
        counters.values.clear()  # that page was nobody's
        return with_direct_writes(transport, pool, counters=counters) if settings.direct_writes else transport

    thread = TransferThread(
        make,
        on_fatal=lambda: agent.on_fatal(),  # noqa: PLW0108 - it changes
        packer=packer(pool),
        expected_routes=expected,
    )
    agent = PoolAgent(thread, fences.cells, on_fatal)
    thread.start()
    return agent


def _say_own_route(name: str, route: str, expected: tuple[str, ...], *, on_device: bool) -> None:
    """Warn when even within this process bytes of host memory go over TCP: then they do so to every peer.

    Of a device's memory that says nothing: CUDA maps it into other processes, not once more into its own.
    """
    if on_device or is_expected(route, ()) or "tcp" in expected:
        log.info("%s has relayed a page to itself over %s", name, route)
    else:
        log.warning("%s relays over %s, even to itself; expected is shared memory, NVLink or RDMA", name, route)
