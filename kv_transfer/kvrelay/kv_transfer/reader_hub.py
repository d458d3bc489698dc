"""Every hand-off that a decode node receives: tickets out, Attach streams in, pages back.

All methods run on the event loop's thread. Pages go back to their allocator in one way only: `on_pages_free`.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc import aio

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import InvalidRequestError, StaleMessageError, UnavailableError
from kvrelay.core.types import Counters, Epoch, Incarnation, PageRun
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.attach_stream import serve_stream, take_late_fence
from kvrelay.kv_transfer.fence_cells import FenceCells
from kvrelay.kv_transfer.hub_sessions import HubSessions, remember
from kvrelay.kv_transfer.hub_values import HubCallbacks, HubStats
from kvrelay.kv_transfer.local import Limits, LocalPool
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.values import MAX_RING_SIZE, Request, Reservation
from kvrelay.kv_transfer.wire import address_to_pb, checksum_kind_to_pb, request_to_pb
from kvrelay.kvcache.allocator import pages_of
from kvrelay.proto.convert import epoch_to_pb, incarnation_to_pb, ms_to_pb, runs_to_pb
from kvrelay.proto.v1 import decode_pb2, handoff_pb2

_MOST_DEAD_WRITERS = 1024
_BEFORE_ADMISSION = frozenset({State.RESERVED, State.ATTACHED, State.RECEIVING, State.SEALED})


class ReaderHub:
    """All reader sessions of one node."""

    def __init__(
        self,
        *,
        node: Incarnation,
        endpoint: str,
        pool: LocalPool,
        cells: FenceCells,
        thread: TransferThread,
        callbacks: HubCallbacks,
        limits: Limits,
        clock: Clock = monotonic,
    ) -> None:
        """Serve hand-offs into `pool`.

        Args:
            endpoint: host:port where prefill ranks reach Attach; may be set later, before the first `reserve`.
            cells: those that the transport of `thread` registered.
            thread: started.
        """
        self.endpoint = endpoint
        self._node, self._pool, self._thread, self._clock = node, pool, thread, clock
        self._limits = limits
        self._wants_token = callbacks.wants_token
        self._sessions = HubSessions(
            pool=pool, cells=cells, thread=thread, callbacks=callbacks, limits=limits, clock=clock
        )
        self.last_epoch = 0  # counter of the last reservation; set before the first, from an earlier time in this role
        self._caught_up_s = thread.caught_up_s
        self._dead_writers: OrderedDict[Incarnation, str] = OrderedDict()

    @property
    def counters(self) -> Counters:
        """Of the event loop's thread; the transfer thread has its own."""
        return self._sessions.counters

    # ---- for the servicer ----

    def reserve(
        self,
        request: Request,
        *,
        writer: Incarnation,
        ring_size: int,
        runs: Sequence[PageRun],
        resident_tokens: int,
        prompt_tokens: int,
        timeout_s: float,
        lease_s: float,
    ) -> handoff_pb2.Ticket:
        """Open an epoch over pages that cover the prompt, and return the writer's permission.

        From here on the pages belong to the hub, until `on_pages_free`. An older attempt of the request is aborted.

        Raises:
            CapacityError: no fence slot is free.
            InvalidRequestError: the ring is too large, or resident tokens end inside a page.
            StaleMessageError: this attempt, or a later one, is known already.
            UnavailableError: the writer is known to be gone.
            Then the pages stay the caller's.
        """
        layout = self._pool.layout
        pages = tuple(pages_of(runs))
        assert len(pages) == layout.pages_for(prompt_tokens), f"{len(pages)} pages for {prompt_tokens} tokens"
        self._check_reserve(request, writer, ring_size, resident_tokens, prompt_tokens)
        slot = self._sessions.slots.take()
        older = self._sessions.of_request(request.request_id)
        if older is not None:
            self._sessions.feed(older, ev.Abort(f"superseded by attempt {request.attempt}"))
        self.last_epoch += 1
        reservation = Reservation(
            epoch=Epoch(self._node, self.last_epoch),
            request=request,
            writer=writer,
            ring_size=ring_size,
            pages=pages,
            resident_tokens=resident_tokens,
            prompt_tokens=prompt_tokens,
            num_layers=layout.num_layers,
            row_bytes=layout.row_bytes,
            fingerprint=layout.fingerprint,
            one_time_token=secrets.token_bytes(16),
            wants_token=self._wants_token,
        )
        self._sessions.open(reservation, slot, timeout_s=timeout_s, lease_s=lease_s)
        return self._ticket(reservation, runs, slot, timeout_s)

    def attach(
        self, request_iterator: AsyncIterator[handoff_pb2.WriterEvent], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[handoff_pb2.ReaderEvent]:
        """Serve one rank's stream: DecodeNode.Attach."""
        return serve_stream(self._sessions, request_iterator, context)

    def fenced(self, request: decode_pb2.FencedRequest) -> None:
        """Take a rank's fence that came outside of its stream: DecodeNode.Fenced; see `take_late_fence`."""
        take_late_fence(self._sessions, request)

    def renew(self, request_ids: Sequence[str]) -> list[str]:
        """Extend the leases of reservations; return the ids of which nothing is alive here."""
        unknown: list[str] = []
        for request_id in request_ids:
            entry = self._sessions.of_request(request_id)
            if entry is None or entry.session.failure is not None:
                unknown.append(request_id)
            elif entry.session.state in _BEFORE_ADMISSION:
                self._sessions.feed(entry, ev.Renew(entry.lease_s))
        return unknown

    def abort(self, request: Request, reason: str) -> bool:
        """End an attempt early; return whether it was alive. Never an error."""
        entry = self._sessions.of_request(request.request_id)
        if entry is None or entry.request != request or entry.session.failure is not None:
            return False
        was_active = entry.session.state in (*_BEFORE_ADMISSION, State.ADMITTED)
        self._sessions.feed(entry, ev.Abort(reason))
        return was_active

    # ---- for the scheduler ----

    def claim(self, epoch: Epoch) -> None:
        """The scheduler fills the pages of a reservation itself: from now on nobody may attach. `released` ends it.

        Raises:
            StaleMessageError: a rank has attached, or the epoch is over.
        """
        self._sessions.feed(self._sessions.of_epoch(epoch), ev.Claimed())

    def released(self, epoch: Epoch) -> None:
        """The scheduler is done with the pages of an admitted epoch; call it once.

        Raises:
            StaleMessageError: the epoch is not admitted.
        """
        self._sessions.feed(self._sessions.of_epoch(epoch), ev.Released())

    # ---- for the node ----

    def tick(self) -> None:
        # The time of the tick before: what was reported until then has been fed, whatever waits for the loop now.
        caught_up_s, self._caught_up_s = self._caught_up_s, self._thread.caught_up_s
        for entry in self._sessions.all():
            self._sessions.feed(entry, ev.Tick(caught_up_s))

    def writer_dead(self, writer: Incarnation, why: str) -> None:
        """A writer incarnation is known to be gone: its process was reaped, a newer one registered, or an operator
        fenced it. Its pages come back after the transfer thread has polled for `drain_s`.
        """
        remember(self._dead_writers, writer, why, most=_MOST_DEAD_WRITERS)
        for entry in self._sessions.all():
            if entry.session.reservation.writer == writer and entry.session.state is not State.FREE:
                self._sessions.feed(entry, ev.WriterDead(why))

    def fence(self, name: str, *, start_id: int, alive: Incarnation | None, why: str) -> int:
        """Take lives of a writer for dead: the one with `start_id`, or for 0 every one that sessions are about, except
        `alive`. Return how many pages their writes could reach.
        """
        lives = {
            writer
            for writer in self.open_writers()
            if writer.name == name and writer != alive and start_id in (0, writer.start_id)
        }
        if start_id and (meant := Incarnation(name, start_id)) != alive:
            lives.add(meant)  # it gets no new reservation either
        sessions = [entry.session.reservation for entry in self._sessions.all()]
        pages = sum(len(one.pages) for one in sessions if one.writer in lives)
        for life in lives:
            self.writer_dead(life, why)
        return pages

    def open_writers(self) -> frozenset[Incarnation]:
        """Return the writers that some session is still about, to be compared with the registry."""
        return frozenset(entry.session.reservation.writer for entry in self._sessions.all())

    def stats(self) -> HubStats:
        now_s = self._clock()
        sessions = [entry.session for entry in self._sessions.all()]
        lost = [session for session in sessions if session.state is State.QUARANTINED]
        return HubStats(
            sessions=Counter(session.state.value for session in sessions),
            held_pages=sum(len(session.reservation.pages) for session in sessions),
            quarantined_pages=sum(len(session.reservation.pages) for session in lost),
            oldest_quarantine_s=max((now_s - (session.waits_since_s or now_s) for session in lost), default=0.0),
            tombstones=len(self._sessions.tombstones),
        )

    def _check_reserve(
        self, request: Request, writer: Incarnation, ring_size: int, resident_tokens: int, prompt_tokens: int
    ) -> None:
        if not 1 <= ring_size <= MAX_RING_SIZE:
            raise InvalidRequestError(f"a ring of {ring_size}; it has 1 to {MAX_RING_SIZE} ranks")
        if resident_tokens % self._pool.layout.page_tokens and resident_tokens != prompt_tokens:
            raise InvalidRequestError(f"{resident_tokens} resident tokens end inside a page")
        if not 0 <= resident_tokens <= prompt_tokens:
            raise InvalidRequestError(f"{resident_tokens} resident of {prompt_tokens} tokens")
        if writer in self._dead_writers:
            raise UnavailableError(f"writer {writer} is gone: {self._dead_writers[writer]}")
        live = self._sessions.of_request(request.request_id)
        last = live.request.attempt if live is not None else self._sessions.last_attempts.get(request.request_id, 0)
        if request.attempt <= last:
            raise StaleMessageError(f"attempt {request.attempt} of {request.request_id} after attempt {last}")

    def _ticket(
        self, reservation: Reservation, runs: Sequence[PageRun], slot: int, timeout_s: float
    ) -> handoff_pb2.Ticket:
        return handoff_pb2.Ticket(
            epoch=epoch_to_pb(reservation.epoch),
            request=request_to_pb(reservation.request),
            writer=incarnation_to_pb(reservation.writer),
            ring_size=reservation.ring_size,
            pages=runs_to_pb(runs),
            prompt_tokens=reservation.prompt_tokens,
            resident_tokens=reservation.resident_tokens,
            layout_fingerprint=reservation.fingerprint,
            decode_endpoint=self.endpoint,
            address=address_to_pb(self._thread.address),
            one_time_token=reservation.one_time_token,
            timeout_ms=ms_to_pb(timeout_s),
            fence_slot=slot,
            checksum_kind=checksum_kind_to_pb(self._pool.kind),
        )
