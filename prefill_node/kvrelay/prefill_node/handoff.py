"""Opens this rank's end of each hand-off, and shows the step thread what became of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvrelay.core import tracing
from kvrelay.core.errors import ServeError
from kvrelay.core.shard import Span
from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters, Incarnation, SampledToken
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.outcome import Failed, Outcome
from kvrelay.kv_transfer.plan import Pages
from kvrelay.kv_transfer.pool_agent import local_pool
from kvrelay.kv_transfer.writer_endpoint import WriterEndpoint
from kvrelay.kvcache.pool import LatentPool
from kvrelay.prefill_node.rank_request import Writer
from kvrelay.proto.v1 import handoff_pb2

log = logging.getLogger(__name__)


class WriterOpener:
    """Makes the writers of one rank. Called on the step thread; the streams live on the event loop."""

    def __init__(
        self,
        *,
        transfer: TransferThread,
        pool: LatentPool,
        node: Incarnation,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            wake: called on the loop whenever a hand-off has ended or its sources are free.
        """
        self.counters = Counters()  # of the event loop's thread
        self._transfer = transfer
        self._pool = local_pool(pool)
        self._node = node
        self._rank = rank
        self._loop = loop
        self._limits = limits
        self._wake = wake
        self._runs: set[asyncio.Task[Outcome]] = set()

    def __call__(self, ticket: handoff_pb2.Ticket) -> Writer:
        """Start to attach to the ticket's node; parts may be added at once."""
        # Made here, without a turn of the loop: the first chunk waits for this.
        with tracing.about(ticket.request.request_id):
            try:
                endpoint = WriterEndpoint(
                    ticket=ticket,
                    writer=self._node,
                    rank=self._rank,
                    pool=self._pool,
                    thread=self._transfer,
                    counters=self.counters,
                    limits=self._limits,
                    loop=self._loop,
                )
            except ServeError as err:
                return RefusedWriter(str(err))
            writer = EndpointWriter(endpoint, self._wake)
            self._loop.call_soon_threadsafe(self._start, endpoint, ticket.request.request_id)
        return writer

    def _start(self, endpoint: WriterEndpoint, request_id: str) -> None:
        """Run it; its task and all that this starts are of the request, as the context is of whom asked for it."""
        run = keep(endpoint.run(), name=f"hand-off {request_id}")
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)


class EndpointWriter:
    """A WriterEndpoint whose state the step thread may read."""

    def __init__(self, endpoint: WriterEndpoint, wake: Callable[[], None]) -> None:
        self.failure: str | None = None
        self.settled = False
        self.sources_free = False
        self._endpoint = endpoint
        self._wake = wake
        endpoint.done.add_done_callback(self._on_done)
        endpoint.sources_free.add_done_callback(self._on_sources_free)

    def add_part(self, layer: int, tokens: Span, src_pages: Pages) -> None:
        self._endpoint.add_part(layer, tokens, src_pages)

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        self._endpoint.seal(first_token=first_token, cached_tokens=cached_tokens)

    def abort(self, reason: str) -> None:
        self._endpoint.abort(reason)

    def _on_done(self, done: asyncio.Future[Outcome]) -> None:
        outcome = done.result()
        if isinstance(outcome, Failed):
            self.failure = outcome.reason
            if outcome.stuck:
                log.error("a hand-off holds its pages until this node restarts: %s", outcome.reason)
        else:
            self.settled = True
        self._wake()

    def _on_sources_free(self, _: asyncio.Future[None]) -> None:
        self.sources_free = True
        self._wake()


class RefusedWriter:
    """A hand-off that could not begin: its ticket is wrong for this rank."""

    settled = False
    sources_free = True

    def __init__(self, failure: str) -> None:
        self.failure = failure

    def add_part(self, layer: int, tokens: Span, src_pages: Pages) -> None:
        """Nothing leaves."""

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        """Nothing is sealed."""

    def abort(self, reason: str) -> None:
        """It has failed already."""
