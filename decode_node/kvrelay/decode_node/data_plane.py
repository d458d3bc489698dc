"""The data plane of a decode process: its agent's thread, and the fence cells that writers write into."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.types import Incarnation
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.pool_agent import start_agent
from kvrelay.kv_transfer.transport import Cells
from kvrelay.kv_transfer.values import MAX_RING_SIZE
from kvrelay.kvcache.pool import LatentPool


def start_transfer(
    pool: LatentPool, settings: DecodeSettings, node: Incarnation, *, on_fatal: Callable[[], None]
) -> tuple[TransferThread, Cells]:
    """Start the agent of the data plane; return it and the fence cells.

    Raises:
        TransferError: the transport does not start.
    """
    # A slot outlives its request for as long as a fence is missing, so there are more slots than requests.
    num_cells = 2 * settings.max_requests * MAX_RING_SIZE
    return start_agent(pool, settings, node=node, rank=0, num_cells=num_cells, on_fatal=on_fatal)
