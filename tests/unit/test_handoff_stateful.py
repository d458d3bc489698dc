"""Random lives of whole hand-offs: real sessions of both sides, and a model of all that lies between and around them.

Messages are delayed and lost with their stream, a fence that is said late comes any number of times, notices come in
any order, twice or never; writes land when they like; links break; ranks are stopped and go on; writer, reader and
router die, and start again with new lives. Held throughout: no page is anybody else's, or nobody's, while a write under
the epoch that had it can still land. At the end every session has ended and every page is back.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.core.errors import ServeError
from kvrelay.core.shard import Span
from kvrelay.core.types import Epoch, Incarnation, SampledToken
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer import writer_table as wt
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.values import FenceProof, Part, Request, Reservation
from kvrelay.kv_transfer.writer_session import WriterSession
from kvrelay.kv_transfer.writer_table import WriterState
from session_lab import DEADLINE_S, FENCE_S, FINGERPRINT, LEASE_S

RANKS, LAYERS, PAGES, PAGE_TOKENS = 2, 2, 6, 8
_BEFORE_ADMISSION = frozenset({State.RESERVED, State.ATTACHED, State.RECEIVING, State.SEALED})
_WRITING = frozenset({WriterState.PENDING, WriterState.ATTACHED, WriterState.POSTING})
# Of the worst less, or nothing would live for long.
_FAULTS = (
    *2 * (
        "a_stream_breaks", "a_fence_is_said_late", "a_notice_comes_out_of_order_or_twice", "a_notice_is_lost",
        "a_link_breaks", "a_failed_write_lands_or_is_lost", "the_router_gives_up", "prefill_is_stopped_or_goes_on",
    ),
    "the_router_dies_or_starts", "prefill_is_killed_and_starts_again", "decode_is_killed_and_starts_again",
)  # fmt: skip
Message = Callable[[], None]  # what its arrival does
picks = st.integers(0, 1 << 16)


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


class Fleet(RuleBasedStateMachine):
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

    # ---- what happens by itself ----

    @precondition(lambda self: len(self.free) >= 2 and self.router_alive)
    @rule(order=st.lists(picks, max_size=12))
    def reserves(self, order: list[int]) -> None:
        pages = tuple(sorted(self.free)[:2])
        self.free.difference_update(pages)
        number = next(self.numbers)
        reservation = Reservation(
            Epoch(self.decode, number), Request("r", number), self.prefill, RANKS, pages, 0, RANKS * PAGE_TOKENS,
            LAYERS, 10, FINGERPRINT, b"token",
        )  # fmt: skip
        session = ReaderSession(
            reservation, deadline_s=self.now_s + DEADLINE_S, lease_until_s=self.now_s + LEASE_S, fence_timeout_s=FENCE_S
        )
        self.handoffs.append(handoff := Handoff(session, pages))
        for rank in range(RANKS):
            writer = WriterSession(f"{number}/{rank}", deadline_s=self.now_s + DEADLINE_S, fence_timeout_s=FENCE_S)
            self.ranks.append(Rank(handoff, rank, self.prefill, writer))
        self.work_goes_on_for(order)

    def _pick(self, choices: list[Rank], pick: int) -> Rank | None:
        return choices[pick % len(choices)] if choices else None

    def _moving(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.alive and not self.stopped]

    @precondition(lambda self: self.possible())
    @rule(order=st.lists(picks, min_size=1, max_size=12))
    def work_goes_on(self, order: list[int]) -> None:
        self.work_goes_on_for(order)

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

    def a_stream_breaks(self, pick: int) -> None:
        rank = self._pick([one for one in self.ranks if one.stream == "open"], pick)
        if rank is not None:
            self._break(rank)

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

    def a_fence_is_said_late(self, pick: int) -> None:
        """Again and again: the same word may come more than once."""
        if self.late_words:
            rank, proof = self.late_words[pick % len(self.late_words)]
            self._late(rank, proof)

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

    def a_notice_comes_out_of_order_or_twice(self, pick: int) -> None:
        if self.notices:
            self._notice(at=pick % len(self.notices), again=bool(pick & 1024))

    def a_notice_is_lost(self, pick: int) -> None:
        if self.notices:
            self.notices.pop(pick % len(self.notices))

    def a_link_breaks(self, pick: int) -> None:
        """Handles fail; what was in sockets may still land, or be lost."""
        rank = self._pick([one for one in self._moving() if not one.broken and one.session.num_posted], pick)
        if rank is not None:
            rank.broken = True
            for write in rank.writes:
                write.failed = True
            self.feed_writer(rank, wt.WriteFailed("the peer does not answer"))

    def a_failed_write_lands_or_is_lost(self, pick: int) -> None:
        """Both are the same to us: nobody is told."""
        if failed := [write for rank in self.ranks for write in rank.writes if write.failed]:
            self._land(failed[pick % len(failed)])

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

    @rule(fault=st.sampled_from(_FAULTS), pick=picks)
    def something_goes_wrong(self, fault: str, pick: int) -> None:
        getattr(self, fault)(pick)

    @rule()
    def decode_has_polled(self) -> None:
        """Long enough that what was in its sockets has landed: of dead writers nothing comes after this."""
        for rank in self.ranks:
            if not rank.alive:
                rank.writes.clear()
        waiting, self.drains = self.drains, []
        for done in waiting:
            done()

    # ---- people, processes, time ----

    @rule()
    def releases(self) -> None:
        for handoff in self.handoffs:
            if handoff.session.state is State.ADMITTED:
                self.feed(handoff, ev.Released())

    def the_router_gives_up(self, pick: int) -> None:
        if self.handoffs:
            self.feed(self.handoffs[pick % len(self.handoffs)], ev.Abort("the client went away"))

    def the_router_dies_or_starts(self, _: int) -> None:
        self.router_alive = not self.router_alive

    @rule(by_s=st.sampled_from([0.1, 1.0, FENCE_S]))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        for handoff in self.handoffs:
            if self.router_alive:
                self.feed(handoff, ev.Renew(LEASE_S))
            self.feed(handoff, ev.Tick())
        for rank in self._moving():
            self.feed_writer(rank, wt.Tick())

    def prefill_is_stopped_or_goes_on(self, _: int) -> None:
        self.stopped = not self.stopped

    def prefill_is_killed_and_starts_again(self, _: int) -> None:
        """Its kernel may still deliver what was written; the registry knows its successor."""
        dead, self.prefill, self.stopped = self.prefill, Incarnation("prefill", next(self.numbers)), False
        for rank in self.ranks:
            if rank.alive and rank.life == dead:
                rank.alive = False
                if rank.stream == "open":
                    self._break(rank)
                rank.stream = "over"
        # A dead process says nothing; its words are gone with it.
        self.late_words = [(rank, proof) for rank, proof in self.late_words if rank.alive]
        for handoff in list(self.handoffs):
            if handoff.session.reservation.writer == dead:
                self.feed(handoff, ev.WriterDead("replaced"))

    def decode_is_killed_and_starts_again(self, _: int) -> None:
        """Its memory is gone: nothing that was meant for it lands anywhere."""
        self.decode = Incarnation("decode", next(self.numbers))
        self.handoffs, self.free = [], set(range(PAGES))
        self.notices, self.late_words, self.drains = [], [], []
        for rank in self.ranks:
            rank.writes.clear()
            rank.broken = True
            if rank.stream == "open":
                self._break(rank)
            rank.stream = "over"
            if rank.session.num_posted:
                self.feed_writer(rank, wt.WriteFailed("the peer is gone"))
        self.ranks = [rank for rank in self.ranks if rank.alive and rank.session.state is not WriterState.FENCED]

    @invariant()
    def no_page_is_anybody_elses_while_a_write_can_still_land_in_it(self) -> None:
        owners = {page: one for one in self.handoffs if not one.is_over for page in one.pages}
        assert not self.free & owners.keys()
        for rank in self.ranks:
            if rank.writes:
                assert all(owners.get(page) is rank.epoch for page in rank.epoch.pages), rank.session._name

    def teardown(self) -> None:
        """Without any further fault everything ends, and every page is back."""
        self.stopped, self.router_alive = False, False
        for _ in range(60):
            self.now_s += FENCE_S
            for rank in self.ranks:
                if rank.stream == "new":
                    rank.stream = "over"
                    self.feed_writer(rank, wt.StreamLost("never called"))
                while rank.up:
                    rank.up.popleft()()
                while rank.down:
                    rank.down.popleft()()
            for write in [write for rank in self.ranks for write in rank.writes]:
                self._land(write)
            while self.notices:
                self._notice(at=0, again=False)
            for rank in self._moving():
                self._move(rank)
            for rank, proof in list(self.late_words):
                self._late(rank, proof)
            self.decode_has_polled()
            self.releases()
            for handoff in self.handoffs:
                self.feed(handoff, ev.Tick())
            for rank in self._moving():
                self.feed_writer(rank, wt.Tick())
        ended = {WriterState.SETTLED, WriterState.FENCED, WriterState.LOST, WriterState.STUCK}
        assert [one.session.state for one in self.handoffs if not one.is_over] == []
        assert self.free == set(range(PAGES))
        assert all(rank.session.state in ended for rank in self.ranks if rank.alive)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
