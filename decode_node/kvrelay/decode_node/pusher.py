"""Writes cached blocks into the pages of a prefill node that asks for them: a hand-off with the roles exchanged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvrelay.core.errors import CapacityError, TransferError
from kvrelay.core.shard import Span
from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters, Incarnation
from kvrelay.decode_node.admission import PageBook
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.outcome import Failed, Outcome
from kvrelay.kv_transfer.pool_agent import local_pool
from kvrelay.kv_transfer.push_servicer import picked_pages
from kvrelay.kv_transfer.writer_endpoint import WriterEndpoint
from kvrelay.kvcache.pool import LatentPool
from kvrelay.proto.v1 import blocks_pb2

log = logging.getLogger(__name__)
# Checksums of one portion take under a millisecond at 10 GB/s and 1 KiB rows.
PORTION_TOKENS = 8192


class Pusher:
    """All pushes of a node. Owned by the event loop."""

    def __init__(
        self,
        *,
        node: Incarnation,
        book: PageBook,
        pool: LatentPool,
        thread: TransferThread,
        limits: Limits,
        max_pushes: int,
    ) -> None:
        """`max_pushes`: at once; more are refused."""
        self.counters = Counters()
        self._max_pushes = max_pushes
        self._sums = ThreadPoolExecutor(1, thread_name_prefix="push", initializer=pool.bind_thread)
        self._node = node
        self._book = book
        self._pool = local_pool(pool)
        self._thread = thread
        self._limits = limits
        self._running: set[asyncio.Task[Outcome]] = set()

    @property
    def num_active(self) -> int:
        return len(self._running)

    async def push(self, request: blocks_pb2.PushRequest) -> int:
        """Write blocks under a ticket and see it through; return the tokens that were written.

        The pages stay held until no write can read them any more, which may be later.

        Raises:
            CapacityError: too many run already.
            StaleMessageError: some block is not here any more.
            InvalidRequestError: the ticket contradicts itself.
            TransferError: it failed; the asker has been told by the session.
        """
        ticket = request.ticket
        if len(self._running) >= self._max_pushes:
            raise CapacityError(f"{len(self._running)} pushes run here, the limit is {self._max_pushes}")
        held = self._book.pin(request.block_hashes)
        picked = picked_pages(request)
        pages = held if picked is None else tuple(held[number] for number in picked)
        try:
            endpoint = WriterEndpoint(
                ticket=ticket,
                writer=self._node,
                rank=0,
                pool=self._pool,
                thread=self._thread,
                counters=self.counters,
                limits=self._limits,
            )
        except BaseException:
            self._book.release(held)
            raise
        endpoint.sources_free.add_done_callback(lambda _: self._book.release(held))
        running = keep(endpoint.run(), name=f"push {ticket.request.request_id}")
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        self.counters.add("pushes_total")
        try:
            # Checksums take a while, and the event loop has streams to serve.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._sums, self._add_parts, endpoint, pages)
            outcome = await asyncio.shield(running)
        except asyncio.CancelledError:
            endpoint.abort("the node that asked for it went away")
            raise
        if isinstance(outcome, Failed):
            self.counters.add("pushes_failed_total")
            raise TransferError(outcome.reason)
        self.counters.add("pushed_tokens_total", endpoint.relayed_tokens.num_tokens)
        return endpoint.relayed_tokens.num_tokens

    def _add_parts(self, endpoint: WriterEndpoint, pages: Sequence[int]) -> None:
        wanted = endpoint.relayed_tokens
        for layer in range(self._pool.layout.num_layers):
            for start in range(wanted.start, wanted.end, PORTION_TOKENS):
                endpoint.add_part(layer, Span(start, min(start + PORTION_TOKENS, wanted.end)), pages)
        endpoint.seal(first_token=None, cached_tokens=0)
