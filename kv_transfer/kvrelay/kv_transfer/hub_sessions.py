"""The live sessions of a reader hub: events go in here, and what the sessions ask for is done here."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.core import tracing
from kvrelay.core.clock import Clock
from kvrelay.core.errors import ServeError, StaleMessageError
from kvrelay.core.types import Counters, Epoch
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.fence_cells import FenceCells, FenceSlots
from kvrelay.kv_transfer.hub_values import AdmittedHandoff, HubCallbacks
from kvrelay.kv_transfer.landing import Expected
from kvrelay.kv_transfer.local import Limits, LocalPool
from kvrelay.kv_transfer.notice import NoticeKey
from kvrelay.kv_transfer.plan import PartRanges
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.transport import agent_name
from kvrelay.kv_transfer.values import Part, Request, Reservation
from kvrelay.proto.v1 import handoff_pb2

log = logging.getLogger(__name__)

_MOST_TOMBSTONES = 4096
_MAY_LAND = frozenset({State.RESERVED, State.ATTACHED, State.RECEIVING})

Outbox = asyncio.Queue[handoff_pb2.ReaderEvent | None]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Entry:
    """A live session and what belongs to it."""

    session: ReaderSession
    key: NoticeKey
    fence_slot: int
    lease_s: float
    outboxes: dict[int, Outbox] = field(default_factory=dict)
    listens: bool = True  # the transfer thread expects its parts
    shares_device: bool = False  # a rank that writes computes on our GPU

    @property
    def epoch(self) -> Epoch:
        return self.session.reservation.epoch

    @property
    def request(self) -> Request:
        return self.session.reservation.request


class HubSessions:
    """Not locked: the event loop's thread owns it."""

    def __init__(
        self,
        *,
        pool: LocalPool,
        cells: FenceCells,
        thread: TransferThread,
        callbacks: HubCallbacks,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self.counters = Counters()
        self.slots = FenceSlots(cells)
        # How ended epochs ended, and the last attempt of ended requests: late messages are refused with a reason.
        self.tombstones: OrderedDict[Epoch, str] = OrderedDict()
        self.last_attempts: OrderedDict[str, int] = OrderedDict()
        self.device = pool.device
        self._pool, self._thread, self._callbacks = pool, thread, callbacks
        self._limits, self._clock = limits, clock
        self._loop = asyncio.get_running_loop()
        self._entries: dict[Epoch, Entry] = {}
        self._by_request: dict[str, Entry] = {}  # the latest attempt

    def all(self) -> list[Entry]:
        return list(self._entries.values())

    def of_request(self, request_id: str) -> Entry | None:
        """Return the latest attempt, while it lives."""
        return self._by_request.get(request_id)

    def of_epoch(self, epoch: Epoch) -> Entry:
        """Return a live session.

        Raises:
            StaleMessageError: it is over, or never was.
        """
        entry = self._entries.get(epoch)
        if entry is None:
            raise StaleMessageError(f"epoch {epoch} is not open: {self.tombstones.get(epoch, 'unknown or long over')}")
        return entry

    def open(self, reservation: Reservation, slot: int, *, timeout_s: float, lease_s: float) -> None:
        now_s = self._clock()
        session = ReaderSession(
            reservation,
            deadline_s=now_s + timeout_s,
            lease_until_s=now_s + lease_s,
            fence_timeout_s=self._limits.fence_timeout_s,
        )
        key = NoticeKey.of(reservation.epoch, reservation.request)
        entry = Entry(session, key, slot, lease_s)
        self._entries[reservation.epoch] = self._by_request[reservation.request.request_id] = entry
        self.counters.add("sessions_reserved_total")
        ranges = PartRanges(self._pool.layout, pages=reservation.pages, pool_pages=self._pool.num_pages)
        self._thread.expect(
            key,
            Expected(
                agents=tuple(agent_name(reservation.writer, rank) for rank in range(reservation.ring_size)),
                verify=lambda part: self._verify(reservation, ranges, part),
                on_landed=lambda parts: self._from_thread(lambda: self._landed(entry, parts)),
            ),
        )

    def _verify(self, reservation: Reservation, ranges: PartRanges, part: Part) -> bool:
        """Runs on the transfer thread."""
        inside = part.tokens.intersect(reservation.relayed_tokens) == part.tokens
        if not inside or part.layer >= reservation.num_layers:
            return False
        return self._pool.checksum(ranges.of(part.layer, part.tokens)) == part.checksum

    def _landed(self, entry: Entry, parts: Sequence[ev.PartLanded]) -> None:
        for part in parts:
            self.feed_from_peer(entry, part)
        # A device whose time a rank needs is awake; in any other state the request has work for it already.
        if entry.session.state in _MAY_LAND and not entry.shares_device:
            self._callbacks.on_landed()

    def feed_from_peer(self, entry: Entry, event: ev.Event) -> None:
        """Apply what a peer sent; what is stale is counted and changes nothing."""
        try:
            self.feed(entry, event)
        except StaleMessageError as err:
            self.counters.add("handoff_events_stale_total")
            with tracing.about(entry.request.request_id):
                log.info("ignored: %s", err)

    def after_drain(self, call: Callable[[], None]) -> None:
        """Call once the transfer thread has polled for so long that what lay in our sockets has landed."""
        self._thread.drain(self._limits.drain_s, lambda: self._from_thread(call))

    def feed(self, entry: Entry, event: ev.Event) -> None:
        with tracing.about(entry.request.request_id):
            self._feed(entry, event)

    def _feed(self, entry: Entry, event: ev.Event) -> None:
        session, before = entry.session, entry.session.state
        actions = session.handle(event, now_s=self._clock())
        if session.state is not before:
            self.counters.add(f"sessions_{session.state.value}_total")
        if isinstance(event, ev.ManifestIn) and session.state in _MAY_LAND:
            self._thread.hurry()
        if entry.listens and session.all_fenced and session.state not in _MAY_LAND:
            entry.listens = False
            self._thread.forget(entry.key)
        for action in actions:
            self._do(entry, action)

    def _do(self, entry: Entry, action: ev.Action) -> None:
        match action:
            case ev.SendAttached():
                self._send(entry, action.rank, handoff_pb2.ReaderEvent(attached=handoff_pb2.Attached()))
            case ev.SendAdmitted():
                self._send(entry, action.rank, handoff_pb2.ReaderEvent(admitted=handoff_pb2.Admitted()))
            case ev.SendAbort():
                abort = handoff_pb2.ReaderAbort(reason=action.reason)
                self._send(entry, action.rank, handoff_pb2.ReaderEvent(abort=abort))
            case ev.SendClosed():
                self._send(entry, action.rank, handoff_pb2.ReaderEvent(closed=handoff_pb2.Closed()))
            case ev.Admit():
                self._admit(entry)
            case ev.Fail():
                self.counters.add("handoffs_failed_total")
                self._callbacks.on_failed(entry.epoch, entry.request, action.reason)
            case ev.Drain():
                self.after_drain(lambda: self._drained(entry))
            case ev.Quarantine():
                log.error(
                    "epoch %s: %d pages are quarantined: no fence", entry.epoch, len(entry.session.reservation.pages)
                )
                self._callbacks.on_quarantined(entry.epoch)
            case ev.FreePages():
                self._free(entry)

    def _send(self, entry: Entry, rank: int, event: handoff_pb2.ReaderEvent) -> None:
        outbox = entry.outboxes.get(rank)
        if outbox is not None:
            outbox.put_nowait(event)
            if event.HasField("closed"):
                outbox.put_nowait(None)

    def _admit(self, entry: Entry) -> None:
        session, now_s = entry.session, self._clock()
        manifest, times = session.first_manifest, session.times
        assert manifest is not None, "a sealed session has rank 0's manifest"
        assert times.manifest_s is not None
        sealed_s = times.sealed_s or now_s
        landed_s = max(times.manifest_s, times.last_landed_s or times.manifest_s)
        row_bytes = session.reservation.row_bytes
        self.counters.add("bytes_relayed_total", session.landed_tokens * row_bytes)
        admitted = AdmittedHandoff(
            epoch=entry.epoch,
            request_id=entry.request.request_id,
            first_token=manifest.first_token,
            cached_tokens=manifest.cached_tokens,
            exposed_relay_ms=(landed_s - times.manifest_s) * 1000,
            verify_ms=(sealed_s - landed_s) * 1000,
            relayed_bytes=session.landed_tokens * row_bytes,
            early_bytes=session.early_tokens * row_bytes,
            sealed_at_s=sealed_s,
        )
        try:
            self._callbacks.on_admitted(admitted)
        except ServeError as err:
            self.feed(entry, ev.Abort(f"not admitted: {err}"))
        else:
            self.feed(entry, ev.Admitted())

    def _drained(self, entry: Entry) -> None:
        if entry.session.state not in (State.FENCED, State.FREE):
            self.feed(entry, ev.Drained())

    def _free(self, entry: Entry) -> None:
        session = entry.session
        for proof in session.proofs.values():
            self.counters.add(f"fences_{proof.value}_total")
        self.counters.add("parts_duplicate_total", session.num_duplicates)
        self._callbacks.on_pages_free(entry.epoch, session.reservation.pages)
        self.feed(entry, ev.Freed())
        del self._entries[entry.epoch]
        self.slots.give_back(entry.fence_slot)
        request = entry.request
        if self._by_request.get(request.request_id) is entry:
            del self._by_request[request.request_id]
            remember(self.last_attempts, request.request_id, request.attempt, most=_MOST_TOMBSTONES)
        remember(self.tombstones, entry.epoch, session.failure or "released", most=_MOST_TOMBSTONES)

    def _from_thread(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed: the process is ending, and nobody is left to be told.
            log.warning("the event loop is closed")


def remember(records: OrderedDict[K, V], key: K, value: V, *, most: int) -> None:
    """Add a record; beyond `most` the oldest one goes."""
    records[key] = value
    records.move_to_end(key)
    if len(records) > most:
        records.popitem(last=False)
