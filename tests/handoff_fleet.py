"""Whole hand-offs to play with: real sessions of both sides, and a model of all that lies between and around them.

Streams carry messages in order until they break, notices wait to be heard, writes land when they are let; nothing here
goes wrong by itself. What goes wrong, and when, is the business of the tests that inherit from `HandoffFleet`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis.stateful import RuleBasedStateMachine

from kvrelay.core.errors import ServeError
from kvrelay.core.shard import Span
from kvrelay.core.types import Incarnation, SampledToken
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer import writer_table as wt
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.values import FenceProof, Part
from kvrelay.kv_transfer.writer_session import WriterSession
from kvrelay.kv_transfer.writer_table import WriterState
from session_lab import FINGERPRINT

LAYERS, PAGES, PAGE_TOKENS = 2, 6, 8
_BEFORE_ADMISSION = frozenset({State.RESERVED, State.ATTACHED, State.RECEIVING, State.SEALED})
_WRITING = frozenset({WriterState.PENDING, WriterState.ATTACHED, WriterState.POSTING})
Message = Callable[[], None]  # what its arrival does


@dataclass(eq=False)
class Write:
    """A part on its way."""

    rank: Rank
    part: Part
    failed: bool = False  # its handle has; bytes of it may still come


@dataclass(eq=False)
class Rank:
    """One rank's end of one epoch, and what its transport does for it."""

    epoch: Handoff
    number: int
    life: Incarnation
    session: WriterSession
    up: deque[Message] = field(default_factory=deque)  # to decode
    down: deque[Message] = field(default_factory=deque)
    stream: str = "new"  # then "open", then "over"
    writes: list[Write] = field(default_factory=list)
    fences: str = ""  # how far the fence is: wanted, written, over
    ends: bool = False  # no part will be posted
    drained: bool = False
    broken: bool = False  # the link of its writes
    proof: FenceProof | None = None
    alive: bool = True


@dataclass(eq=False)
class Handoff:
    """One epoch on decode."""

    session: ReaderSession
    pages: tuple[int, ...]
    ranks: dict[int, Rank] = field(default_factory=dict)  # that attach
    released: bool = False

    @property
    def is_over(self) -> bool:
        return self.session.state is State.FREE


class HandoffFleet(RuleBasedStateMachine):
    """A decode node, a prefill node and their hand-offs, of which nothing happens that is not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.numbers = itertools.count(1)
        self.decode, self.prefill = Incarnation("decode", 1), Incarnation("prefill", 1)
        self.free = set(range(PAGES))
        self.handoffs: list[Handoff] = []  # of decode's life
        self.ranks: list[Rank] = []  # of both sides' lives, also of dead ones whose writes may still come
        self.notices: list[tuple[Rank, ev.PartLanded]] = []
        self.late_words: list[tuple[Rank, FenceProof]] = []
        self.drains: list[Message] = []
        self.router_alive = True
        self.stopped = False  # the prefill node's processes

    # ---- decode ----

    def feed(self, handoff: Handoff, event: ev.Event) -> None:
        if handoff not in self.handoffs:
            return  # of a decode process that is gone
        try:
            actions = handoff.session.handle(event, now_s=self.now_s)
        except ServeError:
            return
        for action in actions:
            self._do(handoff, action)

    def _do(self, handoff: Handoff, action: ev.Action) -> None:
        match action:
            case ev.SendAttached():
                self._tell(handoff, action.rank, wt.Attached())
            case ev.SendAdmitted():
                self._tell(handoff, action.rank, wt.Admitted())
            case ev.SendAbort():
                self._tell(handoff, action.rank, wt.GiveUp("decode gave up", tell_reader=False))
            case ev.Admit():
                self.feed(handoff, ev.Admitted())
            case ev.Drain():
                self.drains.append(lambda: self.feed(handoff, ev.Drained()))
            case ev.FreePages():
                self.free.update(handoff.pages)
                self.feed(handoff, ev.Freed())
            case _:
                pass

    def _tell(self, handoff: Handoff, number: int, event: wt.WriterEvent) -> None:
        rank = handoff.ranks.get(number)
        if rank is not None and rank.stream == "open":
            rank.down.append(lambda: self.feed_writer(rank, event))

    def fence_comes(self, rank: Rank, proof: FenceProof) -> None:
        event = ev.Fenced(rank.number, proof)
        if proof is FenceProof.LINK_CLOSED:
            self.drains.append(lambda: self.feed(rank.epoch, event))
        else:
            self.feed(rank.epoch, event)

    # ---- prefill ----

    def feed_writer(self, rank: Rank, event: wt.WriterEvent) -> None:
        if not rank.alive:
            return
        try:
            actions = rank.session.handle(event, now_s=self.now_s)
        except ServeError:
            return
        for action in actions:
            self._do_writer(rank, action)

    def _do_writer(self, rank: Rank, action: wt.WriterAction) -> None:
        match action:
            case wt.Post():
                if rank.broken:
                    self.feed_writer(rank, wt.WriteFailed("the link is broken"))
                else:
                    rank.writes.append(Write(rank, action.part))
            case wt.Finish():
                rank.ends = True
            case wt.StopAndFence():
                rank.ends, rank.fences = True, "wanted"
            case wt.SendManifest():
                manifest = action.of_rank(rank.number)
                self._say(rank, lambda: self.feed(rank.epoch, ev.ManifestIn(manifest)))
            case wt.SendAbort():
                self._say(rank, lambda: self.feed(rank.epoch, ev.Abort("a rank gave up")))
            case wt.SendFenced():
                proof = rank.proof = action.proof
                if rank.stream == "over":
                    self.late_words.append((rank, proof))
                else:
                    self._say(rank, lambda: self.fence_comes(rank, proof))
            case _:
                pass

    def _say(self, rank: Rank, message: Message) -> None:
        if rank.stream != "over":
            rank.up.append(message)

    def _pick(self, choices: list[Rank], pick: int) -> Rank | None:
        return choices[pick % len(choices)] if choices else None

    def _moving(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.alive and not self.stopped]

    def work_goes_on_for(self, order: list[int]) -> None:
        for pick in order:
            if can := self.possible():
                can[pick % len(can)]()

    def possible(self) -> list[Callable[[], None]]:
        """Return what may happen next without anybody's fault."""
        can: list[Callable[[], None]] = []
        for rank in self._moving():
            if rank.stream == "new":
                can.append(partial(self._attach, rank))
            if rank.down:
                can.append(partial(self._hear, rank))
            if rank.stream != "new" and rank.session.state in _WRITING and rank.session._sealed is None:
                can.append(partial(self._compute, rank))
            if self._transport_can_move(rank):
                can.append(partial(self._move, rank))
        for rank in self.ranks:
            if rank.up:
                can.append(partial(self._listen, rank))
            can += [partial(self._land, write) for write in rank.writes if not write.failed]
        if self.notices:
            can.append(partial(self._notice, again=False, at=0))
        return can + [partial(self._late, rank, proof) for rank, proof in self.late_words if not rank.epoch.is_over]

    def _attach(self, rank: Rank) -> None:
        rank.stream = "open"
        rank.up.append(lambda: self._hello(rank))

    def _hear(self, rank: Rank) -> None:
        rank.down.popleft()()

    def _listen(self, rank: Rank) -> None:
        rank.up.popleft()()

    def _hello(self, rank: Rank) -> None:
        ours = rank.epoch.session.reservation
        if rank.number not in rank.epoch.ranks:
            rank.epoch.ranks[rank.number] = rank
        self.feed(rank.epoch, ev.Attach(rank.number, rank.life, ours.request, ours.one_time_token, FINGERPRINT))

    def _compute(self, rank: Rank) -> None:
        layer = len(rank.session._parts)
        if layer < LAYERS:
            span = Span(rank.number * PAGE_TOKENS, (rank.number + 1) * PAGE_TOKENS)
            self.feed_writer(rank, wt.AddPart(Part(layer, layer, span, 7)))
        else:
            self.feed_writer(rank, wt.Seal(None if rank.number else SampledToken(1), 0))

    def _break(self, rank: Rank) -> None:
        """What was on its way is lost; each side notices."""
        rank.stream = "over"
        lost_hello = rank.epoch.session.stream_of(rank.number) is None
        rank.up.clear()
        rank.down.clear()
        if not lost_hello:
            self.feed(rank.epoch, ev.StreamLost(rank.number))
        self.feed_writer(rank, wt.StreamLost("the network was cut"))
        if rank.proof is not None:
            self.late_words.append((rank, rank.proof))

    def _late(self, rank: Rank, proof: FenceProof) -> None:
        if rank.epoch.session.stream_of(rank.number) is not None:
            self.fence_comes(rank, proof)
        elif rank.epoch.session.state in _BEFORE_ADMISSION:
            self.feed(rank.epoch, ev.Abort("a rank gave up before it was let in"))

    def _land(self, write: Write) -> None:
        write.rank.writes.remove(write)
        if not write.failed:
            landed = ev.PartLanded(write.rank.number, write.part, True, self.now_s, self.now_s)
            self.notices.append((write.rank, landed))

    def _notice(self, *, at: int, again: bool) -> None:
        rank, landed = self.notices[at] if again else self.notices.pop(at)
        self.feed(rank.epoch, landed)

    def _transport_can_move(self, rank: Rank) -> bool:
        in_flight = any(not write.failed for write in rank.writes)
        drains = rank.ends and not in_flight and not rank.drained
        fences = rank.fences == "wanted" and (rank.broken or not in_flight)
        return drains or fences or (rank.fences == "failed" and not rank.writes)

    def _move(self, rank: Rank) -> None:
        in_flight = any(not write.failed for write in rank.writes)
        if rank.ends and not in_flight and not rank.drained:
            rank.drained = True
            self.feed_writer(rank, wt.Drained())
        self._move_fence(rank, in_flight=in_flight)

    def _move_fence(self, rank: Rank, *, in_flight: bool) -> None:
        if rank.fences == "wanted":
            if rank.broken:
                rank.fences = "failed"
                self.feed_writer(rank, wt.FenceFailed("the peer does not answer"))
            elif not in_flight:  # the eight bytes come behind all that was posted before
                rank.fences = "over"
                self.feed_writer(rank, wt.FenceDone(FenceProof.CELL_WRITTEN))
        elif rank.fences == "failed" and not rank.writes:  # no socket has bytes of it any more
            rank.fences = "over"
            self.feed_writer(rank, wt.FenceDone(FenceProof.LINK_CLOSED))
