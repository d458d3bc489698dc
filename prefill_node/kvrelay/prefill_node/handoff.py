"""Opens this rank's end of each hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kvcache.pool import LatentPool
from kvrelay.prefill_node.rank import Writer
from kvrelay.proto.v1 import ring_pb2


class WriterOpener:
    def __init__(
        self,
        transfer: TransferThread,
        pool: LatentPool,
        node: Incarnation,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        *,
        max_message_bytes: int,
        fence_timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._loop = loop

    def __call__(self, opened: ring_pb2.RingOpen) -> Writer:
        raise NotImplementedError
