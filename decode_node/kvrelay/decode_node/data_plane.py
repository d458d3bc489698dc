"""The data plane of a decode process: its agent, with the fence cells that writers write into."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.types import Incarnation
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.pool_agent import PoolAgent, start_agent
from kvrelay.kv_transfer.values import MAX_RING_SIZE
from kvrelay.kvcache.pool import LatentPool


def start_decode_agent(
    pool: LatentPool, settings: DecodeSettings, node: Incarnation, *, on_fatal: Callable[[], None]
) -> PoolAgent:
    """Start the agent of the data plane. It also serves a process that prefills: writers need a few cells only.

    Raises:
        TransferError: the transport does not start.
    """
    # A slot outlives its request for as long as a fence is missing, so there are more slots than requests.
    num_cells = 2 * settings.max_requests * MAX_RING_SIZE
    return start_agent(pool, settings, node=node, rank=0, num_cells=num_cells, on_fatal=on_fatal)
