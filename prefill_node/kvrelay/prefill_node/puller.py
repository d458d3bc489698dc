"""Fetches blocks of a prompt from a node that has them, ahead of the prompt's computation.

It is a hand-off with the roles exchanged: this node reserves pages, the other one writes into them, and the same
session decides when they may be read and when they come back. What fails here is computed instead.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from grpc import aio

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import ServeError, TransferError
from kvrelay.core.types import Counters, Epoch, Incarnation
from kvrelay.kv_transfer.hub_values import AdmittedHandoff, HubCallbacks
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.kv_transfer.values import Request
from kvrelay.kvcache.allocator import runs_of
from kvrelay.prefill_node.fills import Fill
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.step_answer import OnStep, answer_of
from kvrelay.proto.convert import epoch_from_pb
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import blocks_pb2, blocks_pb2_grpc

log = logging.getLogger(__name__)
TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class PullFrom:
    """Who has how much of a prompt, as the router believes."""

    node: Incarnation
    endpoint: str
    tokens: int
    ring_size: int = 1


@dataclass(slots=True)
class _Wait:
    key: str
    admitted: asyncio.Future[None]


class Puller:
    """All fetches of a node of one rank. Owned by the event loop; wire it before the first request."""

    def __init__(
        self,
        *,
        on_step: OnStep,
        block_tokens: int,
        row_bytes: int,
        timeout_s: float,
        limits: Limits,
    ) -> None:
        """
        Args:
            row_bytes: of one token in all layers.
            timeout_s: longest time that a fetch may take.
        """
        self.counters = Counters()
        self._on_step = on_step
        self._block_tokens = block_tokens
        self._row_bytes = row_bytes
        self._timeout_s = timeout_s
        self._limits = limits
        self._waits: dict[Epoch, _Wait] = {}
        self._pushes: set[asyncio.Task[None]] = set()
        self._hub: ReaderHub

    @property
    def callbacks(self) -> HubCallbacks:
        return HubCallbacks(
            on_admitted=self._on_admitted,
            on_failed=self._on_failed,
            on_pages_free=self._on_free,
            wants_token=False,
            on_quarantined=self._on_quarantined,
        )

    def wire(self, hub: ReaderHub) -> None:
        self._hub = hub

    async def keep_time(self) -> None:
        """Make time pass for the sessions, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._hub.tick()

    async def pull(self, job: Job, source: PullFrom, deadline: Deadline) -> int:
        """Fetch whole blocks before a job's last token that this node lacks and `source` has.

        Returns:
            The tokens that came; 0 when nothing was missing, there was no room, or it failed.
        """
        most = min(source.tokens, job.prompt_tokens - 1) // self._block_tokens
        hashes, key = job.usable_hashes[:most], f"pull {job.key}"
        if not hashes:
            return 0
        try:
            fill = await answer_of(self._on_step, lambda control: control.begin_fill(key, hashes))
        except asyncio.CancelledError:
            self._on_step(lambda control: control.end_fill(key))  # it may have begun all the same
            raise
        if fill is None:
            return 0
        self.counters.add("pulls_total")
        try:
            num_tokens = await self._fetch(key, fill, job, source, hashes, deadline)
        except (ServeError, aio.AioRpcError) as err:
            self.counters.add("pulls_failed_total")
            why = err.details() if isinstance(err, aio.AioRpcError) else err
            log.warning("%s from %s failed, its tokens are computed: %s", key, source.node, why)
            return 0
        self.counters.add("pulled_tokens_total", num_tokens)
        self.counters.add("pulled_bytes_total", num_tokens * self._row_bytes)
        return num_tokens

    async def _fetch(
        self, key: str, fill: Fill, job: Job, source: PullFrom, hashes: tuple[bytes, ...], deadline: Deadline
    ) -> int:
        request = Request(job.request.request_id, job.request.attempt)
        num_tokens, timeout_s = len(hashes) * self._block_tokens, min(self._timeout_s, deadline.remaining_s())
        try:
            ticket = self._hub.reserve(
                request,
                writer=source.node,
                ring_size=source.ring_size,
                runs=runs_of(fill.pages),
                resident_tokens=fill.cached_tokens,
                prompt_tokens=num_tokens,
                timeout_s=timeout_s,
                lease_s=timeout_s,
            )
        except ServeError:
            self._on_step(lambda control: control.end_fill(key))
            raise
        epoch, wait = epoch_from_pb(ticket.epoch), _Wait(key, asyncio.get_running_loop().create_future())
        self._waits[epoch] = wait
        push = asyncio.create_task(self._push(source, blocks_pb2.PushRequest(ticket=ticket, block_hashes=hashes)))
        self._pushes.add(push)
        push.add_done_callback(self._pushed)
        try:
            await asyncio.wait((push, wait.admitted), return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
            if not wait.admitted.done() and not push.done():
                raise TransferError(f"not within {timeout_s:g} s")
            if not wait.admitted.done():
                push.result()  # a refusal; a success may be heard before the admission, which is under way then
            # Not awaited itself: a cancelled call would take it along, and the hub still has to resolve it.
            await asyncio.wait((wait.admitted,))
            wait.admitted.result()
            await answer_of(self._on_step, lambda control: control.complete_fill(key))
        finally:
            if wait.admitted.done() and wait.admitted.exception() is None:
                self._hub.released(epoch)  # and the call goes on until the source knows that it may let go
            else:
                push.cancel()
                self._hub.abort(request, "the pull is given up")
                self._on_step(lambda control: control.give_up_fill(key))
        return num_tokens - fill.cached_tokens

    async def _push(self, source: PullFrom, request: blocks_pb2.PushRequest) -> None:
        limits = self._limits
        async with connect(source.endpoint, max_message_bytes=limits.max_message_bytes, tls=limits.tls) as channel:
            await blocks_pb2_grpc.BlockSourceStub(channel).Push(request, timeout=self._timeout_s)

    def _pushed(self, push: asyncio.Task[None]) -> None:
        self._pushes.discard(push)
        if not push.cancelled():
            push.exception()  # whoever waited has heard of it; after the admission it changes nothing

    # ---- what the hub reports ----

    def _on_admitted(self, handoff: AdmittedHandoff) -> None:
        self._waits[handoff.epoch].admitted.set_result(None)

    def _on_failed(self, epoch: Epoch, request: Request, reason: str) -> None:
        wait = self._waits[epoch]
        if not wait.admitted.done():
            wait.admitted.set_exception(TransferError(reason))
            wait.admitted.exception()  # nobody may be waiting any more

    def _on_quarantined(self, epoch: Epoch) -> None:
        key = self._waits[epoch].key
        self._on_step(lambda control: control.quarantine_fill(key))

    def _on_free(self, epoch: Epoch, pages: tuple[int, ...]) -> None:
        key = self._waits.pop(epoch).key
        self._on_step(lambda control: control.end_fill(key))
