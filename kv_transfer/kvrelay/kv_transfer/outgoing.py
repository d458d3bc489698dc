"""The writes of one rank under one epoch: posted in order, watched until they end, fenced when given up.

Lives on the transfer thread; what it finds out it reports as events of the writer's session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.link_end import LinkEnd
from kvrelay.kv_transfer.link_meter import LinkMeter
from kvrelay.kv_transfer.packing import Packed, Packer
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import Done, Failed, Handle, Pending, Transport
from kvrelay.kv_transfer.values import FenceProof
from kvrelay.kv_transfer.writer_table import Drained, FenceDone, FenceFailed, WriteFailed

TransferEvent = WriteFailed | Drained | FenceDone | FenceFailed
OnTransferEvents = Callable[[tuple[TransferEvent, ...]], None]
# Enough to keep a link busy; few enough that polling them all is cheap and that giving up finds most parts unposted.
_MOST_IN_FLIGHT = 32
_MOST_AT_ONCE = 8  # parts that are posted between two rounds of polls, where to post is only to launch


@dataclass(frozen=True, slots=True)
class Posting:
    """One part, ready to be written. Its source bytes stay as they are until the writes have drained."""

    copies: Sequence[Copy]
    notice: bytes


@dataclass(slots=True)
class Outgoing:
    """Not locked: the transfer thread owns it."""

    peer: str
    fence_cell: int
    fence_value: int
    on_events: OnTransferEvents
    meter: LinkMeter = field(default_factory=LinkMeter)  # of the link to the peer, which other writers share
    packer: Packer | None = None  # which other writers share
    clock: Clock = monotonic
    failure: str | None = None
    has_landed: bool = False  # some write has
    closed: bool = False  # nobody will ask for anything any more
    _waiting: deque[Posting] = field(default_factory=deque)
    _packing: deque[tuple[Posting, Packed]] = field(default_factory=deque)  # being gathered, in order
    _in_flight: list[tuple[Handle, Packed | None]] = field(default_factory=list)
    _num_posted: int = 0
    _ends: bool = False  # no part will be added
    _drained: bool = False
    _fences: bool = False
    _fence_settled: bool = False  # its outcome was reported
    _fence: Handle | None = None
    _lost: bool = False  # the fence could not be written, and nothing else has proven yet that nothing more lands
    link_end: LinkEnd | None = None  # from when the link was given up

    @property
    def busy(self) -> bool:
        """True while there is something to post, to poll or to prove."""
        return bool(self._waiting or self._packing or self._in_flight or self._fence is not None or self._lost)

    @property
    def in_flight(self) -> bool:
        return bool(self._packing or self._in_flight or self._fence is not None)

    @property
    def awaits_link_end(self) -> bool:
        """True when only the end of the link can prove that nothing more lands."""
        return self._lost and not self.in_flight

    def link_has_ended(self) -> None:
        self._lost = False
        self.on_events((FenceDone(FenceProof.LINK_CLOSED),))

    def add(self, posting: Posting) -> None:
        if not self._ends and self.failure is None:
            self._waiting.append(posting)

    def finish(self) -> None:
        """No part will follow: report Drained when every handle has ended."""
        self._ends = True

    def stop_and_fence(self) -> None:
        """Post nothing more and prove that nothing more lands."""
        self._drop_unposted()
        self._ends = self._fences = True

    def fail(self, reason: str) -> tuple[TransferEvent, ...]:
        """Note the first failure; the session decides what follows."""
        self._drop_unposted()
        if self.failure is not None:
            return ()
        self.failure = reason
        return (WriteFailed(reason),)

    def step(self, transport: Transport, counters: Counters) -> bool:
        """Poll everything, post or pack a part or few (other writers wait too); return whether anything moved."""
        before = len(self._in_flight)
        events = [*self._poll(transport, counters)]
        moved = len(self._in_flight) != before
        scatters = transport.scatters(self.peer)
        if self._packing and self._packing[0][1].ready():
            events += self._post(transport, counters, *self._packing.popleft())
            moved = True
        else:
            for _ in range(_MOST_AT_ONCE if scatters else 1):
                if not self._waiting or len(self._in_flight) + len(self._packing) >= _MOST_IN_FLIGHT:
                    break
                begun = self._begin(transport, counters, None if scatters else self.packer)
                moved |= begun is not None
                events += begun or ()
        if self._ends and not (self._waiting or self._packing or self._in_flight or self._drained):
            self._drained = True
            events.append(Drained())
        if self._fences:
            events += self._step_fence(transport)
        if events:
            self.on_events(tuple(events))
        return moved or bool(events)

    def _poll(self, transport: Transport, counters: Counters) -> list[TransferEvent]:
        events: list[TransferEvent] = []
        still: list[tuple[Handle, Packed | None]] = []
        for written in self._in_flight:
            handle, packed = written
            progress = transport.poll(handle)
            if isinstance(progress, Pending):
                still.append(written)
                continue
            if isinstance(progress, Done):
                counters.add("bytes_written_total", progress.num_bytes)
                self.has_landed = True
                self.meter.ended(progress.num_bytes, self.clock())
            else:
                counters.add("parts_failed_total")
                self.meter.ended(0, self.clock())
                events += self.fail(progress.reason)
            transport.release(handle)
            if packed is not None:
                packed.release()
        self._in_flight = still
        return events

    def _begin(
        self, transport: Transport, counters: Counters, packer: Packer | None
    ) -> tuple[TransferEvent, ...] | None:
        """Post the next part, or begin to gather its rows; None when it waits for room that our own writes hold."""
        posting = self._waiting[0]
        if packer is None or not packer.gains(posting.copies):
            # Parts leave in any order: this one need not wait for those that are being gathered.
            return self._post(transport, counters, self._waiting.popleft(), None)
        packed = packer.start(posting.copies)
        if packed is not None:
            self._packing.append((self._waiting.popleft(), packed))
            return ()
        if self._packing or any(held is not None for _, held in self._in_flight):
            return None
        # All room is others', whose peers may be stuck: scattered is slow, but depends on nobody.
        return self._post(transport, counters, self._waiting.popleft(), None)

    def _post(
        self, transport: Transport, counters: Counters, posting: Posting, packed: Packed | None
    ) -> tuple[TransferEvent, ...]:
        copies = posting.copies if packed is None else packed.copies
        self.meter.posted(self.clock())
        try:
            self._in_flight.append((transport.post(self.peer, copies, posting.notice), packed))
        except TransferError as err:
            self.meter.ended(0, self.clock())
            if packed is not None:
                packed.release()
            return self.fail(str(err))
        self._num_posted += 1
        counters.add("parts_posted_total")
        counters.add("pieces_posted_total", len(copies))
        if packed is not None:
            counters.add("parts_packed_total")
        return ()

    def _drop_unposted(self) -> None:
        self._waiting.clear()
        for _, packed in self._packing:
            packed.release()  # what is still being gathered there is overwritten by the next gather, in order
        self._packing.clear()

    def _step_fence(self, transport: Transport) -> list[TransferEvent]:
        """Report the first proof there is; keep polling a fence write until it has ended."""
        if self._fence is not None:
            return self._poll_fence(transport, self._fence)
        if self._num_posted == 0:
            return self._settle_fence(FenceDone(FenceProof.NOTHING_POSTED))
        if not self._in_flight and self.failure is None:
            return self._settle_fence(FenceDone(FenceProof.HANDLES_DONE))
        if not self._fence_settled:
            try:
                self._fence = transport.write_fence(self.peer, self.fence_cell, self.fence_value)
            except TransferError as err:
                return self._settle_fence(FenceFailed(str(err)))
        return []

    def _poll_fence(self, transport: Transport, fence: Handle) -> list[TransferEvent]:
        progress = transport.poll(fence)
        if not isinstance(progress, Done | Failed):
            all_done = not self._in_flight and self.failure is None
            return self._settle_fence(FenceDone(FenceProof.HANDLES_DONE)) if all_done else []
        transport.release(fence)
        self._fence = None
        if isinstance(progress, Done):
            return self._settle_fence(FenceDone(FenceProof.CELL_WRITTEN))
        return self._settle_fence(FenceFailed(progress.reason))

    def _settle_fence(self, outcome: FenceDone | FenceFailed) -> list[TransferEvent]:
        if self._fence_settled:
            return []
        self._fence_settled = True
        self._lost = isinstance(outcome, FenceFailed)
        return [outcome]
