"""Random lives of a reader's session against a model of the writers: what can still land is what was not fenced."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.core.errors import ServeError
from kvrelay.core.shard import Span
from kvrelay.core.types import SampledToken
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.values import FenceProof, Manifest, Part
from session_lab import DEADLINE_S, FENCE_S, LEASE_S, NUM_LAYERS, attach, reservation, snapshot

RANKS = 2
ranks = st.integers(0, RANKS - 1)


class Writers(RuleBasedStateMachine):
    """Two ranks that write, seal, fail, fence and die as they please, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.session = ReaderSession(
            reservation(ring_size=RANKS, prompt_tokens=16),
            deadline_s=DEADLINE_S,
            lease_until_s=LEASE_S,
            fence_timeout_s=FENCE_S,
        )
        self.attached: set[int] = set()
        self.quiet: set[int] = set()  # nothing of these ranks can land any more
        self.dead = self.drained = False
        self.pages_out = 0  # how often the pages were given back
        self.admissions = self.failures = 0
        # Each rank writes its half of the tokens in every layer.
        self.parts = {
            rank: [Part(layer, layer, Span(8 * rank, 8 * rank + 8), 7) for layer in range(NUM_LAYERS)]
            for rank in range(RANKS)
        }
        self.landed: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}

    def feed(self, event: ev.Event) -> bool:
        """Return whether the event was legal; an illegal one must have changed nothing."""
        before = snapshot(self.session)
        try:
            actions = self.session.handle(event, now_s=self.now_s)
        except ServeError:
            assert snapshot(self.session) == before
            return False
        for action in actions:
            self.do(action)
        return True

    def do(self, action: ev.Action) -> None:
        match action:
            case ev.Admit():
                assert all(len(self.landed[rank]) == NUM_LAYERS for rank in range(RANKS))
                self.admissions += 1
                self.feed(ev.Admitted())
            case ev.Fail():
                self.failures += 1
            case ev.FreePages():
                assert self.attached <= self.quiet or self.drained, "pages freed while a write may still land"
                self.pages_out += 1
                self.feed(ev.Freed())

    @rule(rank=ranks)
    def attaches(self, rank: int) -> None:
        if self.feed(attach(rank)):
            self.attached.add(rank)

    @rule(rank=ranks, index=st.integers(0, NUM_LAYERS - 1), right=st.sampled_from([True, True, True, False]))
    def lands(self, rank: int, index: int, right: bool) -> None:
        if rank in self.attached and not self.dead:
            legal = self.feed(ev.PartLanded(rank, self.parts[rank][index], right, self.now_s, self.now_s))
            if legal and right:
                self.landed[rank].add(index)

    @rule(rank=ranks)
    def seals(self, rank: int) -> None:
        token = SampledToken(1) if rank == 0 else None
        self.feed(ev.ManifestIn(Manifest(rank, tuple(self.parts[rank]), token)))

    @rule(rank=ranks, proof=st.sampled_from([proof for proof in FenceProof if proof is not FenceProof.KNOWN_DEAD]))
    def fences(self, rank: int, proof: FenceProof) -> None:
        if rank in self.attached:
            self.quiet.add(rank)  # it is true before it is said
        self.feed(ev.Fenced(rank, proof))

    @rule(rank=ranks)
    def stream_breaks(self, rank: int) -> None:
        self.feed(ev.StreamLost(rank))

    @rule()
    def writer_dies(self) -> None:
        self.dead = True
        self.feed(ev.WriterDead("reaped"))

    @precondition(lambda self: self.dead)
    @rule()
    def drains(self) -> None:
        self.drained = True
        self.feed(ev.Drained())

    @rule()
    def aborts(self) -> None:
        assert self.feed(ev.Abort("client went away")), "abort is legal in every state"

    @rule()
    def scheduler_claims(self) -> None:
        if self.feed(ev.Claimed()):
            assert not self.attached, "a writer was let in, and the scheduler writes too"
            self.admissions += 1

    @rule()
    def releases(self) -> None:
        self.feed(ev.Released())

    @rule()
    def renews(self) -> None:
        self.feed(ev.Renew(LEASE_S))

    @rule(by_s=st.floats(0, 2 * FENCE_S))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        assert self.feed(ev.Tick())

    @invariant()
    def each_outcome_is_reported_once(self) -> None:
        assert self.pages_out == (self.session.state is State.FREE)
        assert self.admissions <= 1
        assert self.failures <= 1

    def teardown(self) -> None:
        """Every session ends and gives its pages back, once the scheduler lets go and the writer is gone."""
        self.now_s += DEADLINE_S + LEASE_S
        self.feed(ev.Tick())
        if self.session.state is State.ADMITTED:
            self.feed(ev.Released())
        self.feed(ev.WriterDead("reaped"))
        self.drained = True
        self.feed(ev.Drained())
        assert self.session.state is State.FREE
        assert self.pages_out == 1
        assert self.admissions + self.failures >= 1


TestWriters = Writers.TestCase
TestWriters.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
