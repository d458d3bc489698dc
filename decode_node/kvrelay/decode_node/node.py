"""What a decode node does with a request, from Reserve to its last token. Owned by the asyncio thread; never waits.

Events come from the servicer, the hand-off hub, the step thread and the timer. Pages return to the allocator in one
place, `on_free`, which the hub calls when no writer can reach them any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    RequestCancelledError,
    ServeError,
    StaleMessageError,
    TransferError,
    UnavailableError,
)
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters, Epoch, Incarnation
from kvrelay.decode_node.admission import Grant, PageBook
from kvrelay.decode_node.held_pages import HeldPages
from kvrelay.decode_node.intake import Demand, Limits, judge
from kvrelay.decode_node.local_work import LocalWork
from kvrelay.decode_node.publisher import Publisher
from kvrelay.decode_node.records import Records
from kvrelay.decode_node.requests import Ask, NodeCrashedError, Phase, Record
from kvrelay.decode_node.runner import Crashed, Report, StepThread
from kvrelay.decode_node.running import RunningRequests
from kvrelay.kv_transfer.hub_values import AdmittedHandoff
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.kv_transfer.values import Request
from kvrelay.kvcache.allocator import runs_of
from kvrelay.proto.convert import epoch_from_pb
from kvrelay.proto.v1 import handoff_pb2

log = logging.getLogger(__name__)


class DecodeNode:
    """All requests of one node."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        layout: PageLayout,
        limits: Limits,
        book: PageBook,
        publisher: Publisher,
        max_requests: int,
        lease_s: float,
        clock: Clock = monotonic,
    ) -> None:
        self.incarnation = incarnation
        self.book = book
        self.records = Records()
        self.counters = Counters()
        self.leaving = False  # the others are told to send nothing more here
        self.draining = False  # what comes all the same is refused
        self.crashed = asyncio.Event()
        self._layout = layout
        self._limits = limits
        self._local = LocalWork(limits.local_tokens, layout.block_tokens)
        self._publisher = publisher
        self._max_requests = max_requests
        self._lease_s = lease_s
        self._clock = clock
        self._held = HeldPages(book, layout)
        self._running = RunningRequests(
            incarnation, self.records, self.counters, book, publisher, block_tokens=layout.block_tokens
        )
        self._hub: ReaderHub

    def wire(self, *, hub: ReaderHub, steps: StepThread) -> None:
        """Make the parts known that report back to this one; once, before the first request."""
        self._hub = hub
        self._running.wire(hub=hub, steps=steps)

    @property
    def is_drained(self) -> bool:
        """Nothing runs, and no writer is waited for but those whose pages were given up."""
        return not self.records.num_active and not self._held.waits_for_writers

    # ---- what a router asks ----

    async def reserve(self, ask: Ask) -> tuple[handoff_pb2.Ticket, bool]:
        """Take pages; return the permission to write into them, and whether the node fills them itself instead.

        Raises:
            UnavailableError, LayoutMismatchError, InvalidRequestError: see `judge`; or the node is draining.
            StaleMessageError: this attempt has a reservation already, or was aborted before it came.
            CapacityError: no room now.
        """
        demand = await judge(ask, node=self.incarnation, layout=self._layout, limits=self._limits)
        if self.draining:
            raise UnavailableError(f"{self.incarnation.name} is draining")
        if self.records.was_aborted(ask.request):
            raise StaleMessageError(f"{ask.request} was aborted")
        if (active := self.records.num_active) >= self._max_requests:
            raise CapacityError(f"{active} requests are here, the limit is {self._max_requests}")
        hashes = demand.hashes or []
        computes = ask.may_compute and self._local.takes(demand, book=self.book, records=self.records)
        if computes:
            hashes = self._local.usable(demand)
        grant = self.book.reserve(prompt_tokens=demand.prompt_tokens, max_tokens=demand.max_tokens, hashes=hashes)
        self._publisher.retract(grant.evicted)
        try:
            ticket = self._open(ask, demand, grant)
        except ServeError:
            self.book.release(grant.pages)
            raise
        now_s = self._clock()
        record = Record(
            epoch_from_pb(ticket.epoch), ask, demand.max_tokens, grant.pages, grant.resident_tokens, demand.hashes,
            deadline_s=now_s + ask.timeout_s, renewed_s=now_s, began_s=now_s,
        )  # fmt: skip
        self.records.add(record)
        self._held.hold(record.key, grant, prompt_tokens=demand.prompt_tokens)
        if computes:
            self._running.compute(record)
        return ticket, computes

    def open_stream(self, request: Request, epoch: Epoch) -> Record:
        """Return the record whose events a Decode call is to stream; `close_stream` ends it.

        Raises:
            StaleMessageError: no such reservation, or it has a stream.
        """
        record = self.records.get(epoch.counter) if epoch.decode == self.incarnation else None
        if record is None or record.ask.request != request:
            raise StaleMessageError(f"{epoch} holds no reservation of {request}")
        if record.has_stream:
            raise StaleMessageError(f"{request} is being streamed already")
        record.has_stream = True
        if record.phase is Phase.WAITING:
            self._running.prepare(record)
        return record

    def close_stream(self, record: Record) -> None:
        """The stream has ended: told everything, or broken off, which ends the request."""
        self._give_up(record, RequestCancelledError("the router ended the stream"))
        self.records.forget(record)

    def abort(self, request: Request, reason: str) -> bool:
        """End a request early; False when it is unknown or over."""
        record = self.records.active(request)
        if record is None:
            self.records.remember_abort(request)
            return False
        self._give_up(record, RequestCancelledError(reason or "aborted"))
        return True

    def renew(self, holder: Incarnation, request_ids: Iterable[str]) -> list[str]:
        """Note that the holder of these requests is alive; return those that it does not have here."""
        listed = set(request_ids)
        known: set[str] = set()
        for record in self.records.held_by(holder, listed):
            known.add(record.ask.request.request_id)
            record.renewed_s = self._clock()
        self._hub.renew(sorted(known))
        return sorted(listed - known)

    # ---- what the hand-off hub reports ----

    def on_admitted(self, handoff: AdmittedHandoff) -> None:
        """All latents of a prompt are here and right: hand the request to the step thread.

        Raises:
            InvalidRequestError: the writer's first token is none; nothing has changed, and the hub gives up.
        """
        assert handoff.first_token is not None, "every reservation here wants one"
        if handoff.first_token.token_id >= self._limits.vocab_size:  # a step with it would end the node
            raise InvalidRequestError(
                f"the first token {handoff.first_token.token_id} is outside the vocabulary of {self._limits.vocab_size}"
            )
        record = self.records.get(handoff.epoch.counter)
        assert record is not None, f"{handoff.epoch} has no request"
        assert record.phase is Phase.WAITING, f"{record.epoch} was sealed while {record.phase.value}"
        record.handoff = handoff
        record.output.append(handoff.first_token.token_id)
        record.phase = Phase.RUNNING
        finish = record.finish_of_first
        if finish is None:
            self._running.join(record)  # first of all: the rest happens while its first step runs
            self._running.cache_soon(record)
        else:
            record.events.put_nowait(record.admitted(self._clock()))
            # The hub notes the admission only when this returns.
            asyncio.get_running_loop().call_soon(self._running.finish, record, finish)
        self.counters.add("relayed_bytes", handoff.relayed_bytes)
        self.counters.add("early_bytes", handoff.early_bytes)
        self.counters.add("resident_tokens", record.resident_tokens)

    def on_failed(self, epoch: Epoch, request: Request, reason: str) -> None:
        """The hand-off, or the request as a whole, ends here; its pages come back by `on_free`."""
        record = self.records.get(epoch.counter)
        if record is None:
            return
        if record.phase is Phase.WAITING:
            record.phase = Phase.OVER
        elif record.phase is Phase.RUNNING:
            self._running.give_up(record)
        else:
            return
        self.counters.add("requests_failed")
        record.events.put_nowait(record.error or TransferError(f"{request}: {reason}"))

    def on_quarantined(self, epoch: Epoch) -> None:
        """A writer's end is not proven in time: the pages that it was allowed to write are lost until it is."""
        self._held.quarantine(epoch.counter)

    def on_free(self, epoch: Epoch, pages: tuple[int, ...]) -> None:
        """No writer can reach the prompt's pages any more, and the step thread has let go of all pages."""
        self._held.free(epoch.counter, pages)

    # ---- what the step thread reports ----

    def on_report(self, report: Report) -> None:
        if isinstance(report, Crashed):
            self.crash(f"step thread: {report.reason}")
        else:
            self._running.on_report(report)

    def crash(self, reason: str) -> None:
        """A bug has ended a part of this process: tell every request, and that the process must exit."""
        log.critical("%s; this process exits", reason)
        for record in self.records:
            if record.is_active:
                record.phase = Phase.OVER
                record.events.put_nowait(NodeCrashedError(f"{self.incarnation.name}: {reason}"))
        self.crashed.set()

    # ---- time ----

    def tick(self) -> None:
        """End what is out of time, and what nobody listens to."""
        now_s = self._clock()
        for record in self.records:
            if now_s >= record.deadline_s:
                self._give_up(record, DeadlineError(f"{record.ask.request}: its time is over"))
            if not record.has_stream and now_s >= record.renewed_s + self._lease_s:
                self._give_up(record, RequestCancelledError(f"{record.ask.request}: its holder is silent"))
                if not record.is_active:
                    self.records.forget(record)

    # ---- steps of a request's life ----

    def _open(self, ask: Ask, demand: Demand, grant: Grant) -> handoff_pb2.Ticket:
        return self._hub.reserve(
            ask.request,
            writer=ask.writer,
            ring_size=ask.ring_size,
            runs=runs_of(grant.pages[: self._layout.pages_for(demand.prompt_tokens)]),
            resident_tokens=grant.resident_tokens,
            prompt_tokens=demand.prompt_tokens,
            timeout_s=ask.timeout_s,
            lease_s=self._lease_s,
        )

    def _give_up(self, record: Record, error: ServeError) -> None:
        """End a request from our side; nothing happens when it is over or leaving already."""
        if record.phase in (Phase.WAITING, Phase.RUNNING):
            record.error = error
            self._hub.abort(record.ask.request, str(error))
            assert record.phase in (Phase.LEAVING, Phase.OVER), f"{record.epoch} outlives its abort"
