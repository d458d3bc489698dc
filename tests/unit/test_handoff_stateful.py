"""Random lives of whole hand-offs: real sessions of both sides, and a model of all that lies between and around them.

Messages are delayed and lost with their stream, a fence that is said late comes any number of times, notices come in
any order, twice or never; writes land when they like; links break; ranks are stopped and go on; writer, reader and
router die, and start again with new lives. Held throughout: no page is anybody else's, or nobody's, while a write under
the epoch that had it can still land. At the end every session has ended and every page is back.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from handoff_fleet import LAYERS, PAGE_TOKENS, PAGES, Handoff, HandoffFleet, Rank
from kvrelay.core.types import Epoch, Incarnation
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer import writer_table as wt
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.values import Request, Reservation
from kvrelay.kv_transfer.writer_session import WriterSession
from kvrelay.kv_transfer.writer_table import WriterState
from session_lab import DEADLINE_S, FENCE_S, FINGERPRINT, LEASE_S

RANKS = 2
# Of the worst less, or nothing would live for long.
_FAULTS = (
    *2 * (
        "a_stream_breaks", "a_fence_is_said_late", "a_notice_comes_out_of_order_or_twice", "a_notice_is_lost",
        "a_link_breaks", "a_failed_write_lands_or_is_lost", "the_router_gives_up", "prefill_is_stopped_or_goes_on",
    ),
    "the_router_dies_or_starts", "prefill_is_killed_and_starts_again", "decode_is_killed_and_starts_again",
)  # fmt: skip
picks = st.integers(0, 1 << 16)


class Fleet(HandoffFleet):
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

    @precondition(lambda self: self.possible())
    @rule(order=st.lists(picks, min_size=1, max_size=12))
    def work_goes_on(self, order: list[int]) -> None:
        self.work_goes_on_for(order)

    def a_stream_breaks(self, pick: int) -> None:
        rank = self._pick([one for one in self.ranks if one.stream == "open"], pick)
        if rank is not None:
            self._break(rank)

    def a_fence_is_said_late(self, pick: int) -> None:
        """Again and again: the same word may come more than once."""
        if self.late_words:
            rank, proof = self.late_words[pick % len(self.late_words)]
            self._late(rank, proof)

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
