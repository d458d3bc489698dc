"""One rank's end of one hand-off: the session between the Attach stream and the transfer thread.

Run it on its event loop; the step thread, which may create it, adds parts and seals.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context

from kvrelay.core.clock import monotonic
from kvrelay.core.errors import StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters, Incarnation, SampledToken
from kvrelay.kv_transfer import writer_table as wt
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.fence_cells import cell_of
from kvrelay.kv_transfer.local import Limits, LocalPool
from kvrelay.kv_transfer.notice import Notice, NoticeKey, encode
from kvrelay.kv_transfer.outcome import Failed, Outcome, Settled
from kvrelay.kv_transfer.outgoing import Posting, TransferEvent
from kvrelay.kv_transfer.plan import Pages, Routes
from kvrelay.kv_transfer.ticket import open_ticket
from kvrelay.kv_transfer.values import Part
from kvrelay.kv_transfer.wire import address_to_pb
from kvrelay.kv_transfer.writer_session import WriterSession
from kvrelay.kv_transfer.writer_stream import WriterStream
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.v1 import handoff_pb2

log = logging.getLogger(__name__)

_TICK_S = 0.1


class WriterEndpoint:
    """One (request, rank).

    `done` resolves with the outcome; `sources_free` when no write can read our pages any more, which may be earlier
    or, after a failure, later.
    """

    def __init__(
        self,
        *,
        ticket: handoff_pb2.Ticket,
        writer: Incarnation,
        rank: int,
        pool: LocalPool,
        thread: TransferThread,
        counters: Counters,
        limits: Limits,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Take a ticket; its time counts from now.

        Args:
            pool: our own; its checksum is called on the step thread.
            loop: on which it will run; None: the running one.
            counters: of the event loop's thread.

        Raises:
            StaleMessageError: the ticket names another writer.
            LayoutMismatchError: its pages mean something else than ours.
            InvalidRequestError: it contradicts itself, or wants checksums that this pool cannot give.
        """
        opened = open_ticket(ticket, writer=writer, rank=rank, layout=pool.layout)
        self._ticket, self._address = ticket, opened.address
        self._writer, self._rank, self._pool = writer, rank, pool.summing(opened.checksum_kind)
        self._thread, self._counters = thread, counters
        self._notice_key = NoticeKey.of(opened.epoch, opened.request)
        # A ticket may be used twice, by mistake or on purpose: decode lets in one of the two, and each has its own key.
        self._context = copy_context()  # of the request: what other threads cause is logged under its id
        self._key = f"{opened.epoch}/{rank}/{secrets.token_hex(4)}"
        self._session = WriterSession(
            f"{opened.epoch} rank {rank}",
            deadline_s=monotonic() + ticket.timeout_ms / 1000,
            fence_timeout_s=limits.fence_timeout_s,
        )
        self._loop = loop or asyncio.get_running_loop()
        self._postings: dict[int, Posting] = {}
        self._routes = Routes(  # of the thread that adds parts
            pool.layout,
            src_pool_pages=pool.num_pages,
            dst_pages=opened.pages,
            dst_pool_pages=opened.address.pool_pages,
        )
        self._num_parts = 0
        self._num_summed = 0  # parts whose checksums came from a device; counted by who waits for them
        self._relayed_bytes = 0
        self._writer_open = False
        self._ticker: asyncio.Task[None] | None = None
        self._stream = WriterStream(
            self._hello(opened.destination_digest),
            endpoint=ticket.decode_endpoint,
            row_bytes=pool.layout.row_bytes,
            on_event=self._feed,
            counters=counters,
            limits=limits,
            name=self._key,
            clock=monotonic,
        )
        self.done: asyncio.Future[Outcome] = self._loop.create_future()
        self.sources_free: asyncio.Future[None] = self._loop.create_future()

    @property
    def relayed_tokens(self) -> Span:
        """The positions that the ranks must write between them."""
        return Span(self._ticket.resident_tokens, self._ticket.prompt_tokens)

    # ---- from any thread ----

    def add_part(self, layer: int, tokens: Span, src_pages: Pages) -> None:
        """Send rows that are final; their pages must not change until `sources_free`. From one thread only.

        In device memory they are final once the work has ended that this thread has launched on its stream so far.

        Args:
            tokens: inside `relayed_tokens`.
            src_pages: page of our own pool for each prompt page that `tokens` touches; the same in every layer.
        """
        assert tokens.intersect(self.relayed_tokens) == tokens, f"{tokens} is not to be relayed"
        route = self._routes.of(tokens, src_pages)
        ranges, copies = route.ranges(layer), route.copies(layer)
        part_id = self._num_parts
        self._num_parts += 1

        def add(checksum: int) -> None:
            part = Part(part_id, layer, tokens, checksum)
            posting = Posting(copies, encode(Notice(self._notice_key, self._rank, part)))
            self._call_soon(lambda: self._add(part, posting))

        sums = self._pool.device_sums
        if sums is None:
            add(self._pool.checksum(ranges))
        else:
            wait = sums.start(ranges)

            def add_summed() -> None:
                add(wait())
                self._num_summed += 1

            self._later(sums.waiter, add_summed)

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        """Say that no part will follow; the first token, if one is wanted, comes from rank 0 and only from it."""
        assert first_token is None or self._rank == 0, "only rank 0 has the first token"

        def add() -> None:
            self._call_soon(lambda: self._feed(wt.Seal(first_token, cached_tokens)))

        sums = self._pool.device_sums
        if sums is None or self._num_summed == self._num_parts:
            add()  # without a turn of another thread, for which the second token would wait
        else:  # behind the parts whose checksums are awaited
            self._later(sums.waiter, add)

    def abort(self, reason: str) -> None:
        """Give up. Legal at any time, as often as one likes."""
        self._call_soon(lambda: self._feed(wt.GiveUp(reason, tell_reader=True)))

    # ---- on the loop ----

    async def run(self) -> Outcome:
        """Attach and stay until the end; return what `done` resolves with. To stop it early, use `abort`."""
        self._ticker = ticker = keep(self._tick(), name=f"ticks of {self._key}")
        self.done.add_done_callback(lambda _: ticker.cancel())
        await self._stream.run(self.done)
        return self.done.result()

    async def _tick(self) -> None:
        while not self.done.done():  # also when `run` was cancelled: the fence must come to an end
            await asyncio.sleep(_TICK_S)
            self._feed(wt.Tick())

    def _hello(self, destination_digest: bytes) -> handoff_pb2.AttachHello:
        return handoff_pb2.AttachHello(
            epoch=self._ticket.epoch,
            request=self._ticket.request,
            writer=incarnation_to_pb(self._writer),
            rank=self._rank,
            one_time_token=self._ticket.one_time_token,
            layout_fingerprint=self._pool.layout.fingerprint,
            address=address_to_pb(self._thread.address),
            destination_digest=destination_digest,
            stream_id=secrets.token_bytes(8),
            device=self._pool.device,
        )

    def _add(self, part: Part, posting: Posting) -> None:
        self._postings[part.part_id] = posting
        self._feed(wt.AddPart(part))

    def _on_transfer(self, events: tuple[TransferEvent, ...]) -> None:
        self._call_soon(lambda: self._feed_all(events))

    def _feed_all(self, events: tuple[TransferEvent, ...]) -> None:
        for event in events:
            self._feed(event)

    def _feed(self, event: wt.WriterEvent) -> None:
        try:
            actions = self._session.handle(event, now_s=monotonic())
        except StaleMessageError as err:
            self._counters.add("handoff_events_stale_total")
            log.warning("ignored: %s", err)
            return
        for action in actions:
            self._do(action)

    def _do(self, action: wt.WriterAction) -> None:
        match action:
            case wt.Post():
                self._post(action.part)
            case wt.Finish():
                self._thread.finish(self._key)
            case wt.StopAndFence():
                self._thread.fence(self._key)
            case wt.SendManifest():
                self._stream.say_manifest(action.of_rank(self._rank))
            case wt.SendAbort():
                self._stream.say_abort(action.reason)
            case wt.SendFenced():
                self._counters.add(f"fences_{action.proof.value}_total")
                self._stream.say_fence(action.proof)
            case wt.FreeSources():
                self._postings.clear()
                if not self.sources_free.done():
                    self.sources_free.set_result(None)
            case wt.Settle():
                self._end(Settled(self._relayed_bytes))
            case wt.Fail():
                self._end(Failed(action.reason, action.stuck))

    def _end(self, outcome: Outcome) -> None:
        kind = "settled" if isinstance(outcome, Settled) else "stuck" if outcome.stuck else "failed"
        self._counters.add(f"writers_{kind}_total")
        if self._writer_open:
            self._thread.close_writer(self._key)  # it still reports when the handles have ended
        self.done.set_result(outcome)

    def _post(self, part: Part) -> None:
        if not self._writer_open:
            self._writer_open = True
            self._thread.open_writer(
                self._key,
                self._address,
                fence_cell=cell_of(self._ticket.fence_slot, self._rank),
                fence_value=self._ticket.epoch.counter,
                on_events=self._on_transfer,
            )
        self._relayed_bytes += part.tokens.num_tokens * self._pool.layout.row_bytes
        self._thread.post_part(self._key, self._postings.pop(part.part_id))

    def _later(self, waiter: Executor, call: Callable[[], None]) -> None:
        def failed(done: Future[None]) -> None:
            if (error := done.exception()) is not None:  # a device that computes no checksum computes nothing
                self.abort(f"a checksum failed: {error}")

        waiter.submit(call).add_done_callback(failed)

    def _call_soon(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call, context=self._context)
        except RuntimeError:
            # The loop is closed: the process is ending, and nobody is left to be told.
            log.warning("%s: the event loop is closed", self._key)
