"""The reader's session: the table, and what each way through it asks for."""

from __future__ import annotations

import itertools

import pytest

from kvrelay.core.errors import InvalidRequestError, LayoutMismatchError, ServeError, StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.core.types import Incarnation, SampledToken
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import TRANSITIONS, State
from kvrelay.kv_transfer.values import FenceProof, Manifest, Part, Request
from session_lab import (
    DEADLINE_S,
    FENCE_S,
    FINGERPRINT,
    LEASE_S,
    NUM_LAYERS,
    REQUEST,
    TOKEN,
    WRITER,
    attach,
    reservation,
    snapshot,
)

PARTS = tuple(Part(layer, layer, Span(0, 8), 7) for layer in range(NUM_LAYERS))
MANIFEST = Manifest(0, PARTS, SampledToken(42), 3)
DONE = ev.Fenced(0, FenceProof.HANDLES_DONE)


def a_session(*, ring_size: int = 1, resident_tokens: int = 0) -> ReaderSession:
    return ReaderSession(
        reservation(ring_size=ring_size, resident_tokens=resident_tokens),
        deadline_s=DEADLINE_S,
        lease_until_s=LEASE_S,
        fence_timeout_s=FENCE_S,
    )


def landed(part: Part, *, rank: int = 0, verified: bool = True) -> ev.PartLanded:
    return ev.PartLanded(rank, part, verified, 1.0, 1.0)


def feed(session: ReaderSession, *events: ev.Event, now_s: float = 1.0) -> tuple[ev.Action, ...]:
    """Return the actions of the last event."""
    actions: tuple[ev.Action, ...] = ()
    for event in events:
        actions = session.handle(event, now_s=now_s)
    return actions


WAY: dict[State, tuple[ev.Event, ...]] = {
    State.RESERVED: (),
    State.ATTACHED: (attach(),),
    State.RECEIVING: (attach(), landed(PARTS[0])),
    State.SEALED: (attach(), *map(landed, PARTS), ev.ManifestIn(MANIFEST)),
    State.ADMITTED: (attach(), *map(landed, PARTS), ev.ManifestIn(MANIFEST), ev.Admitted()),
    State.RELEASED: (attach(), *map(landed, PARTS), ev.ManifestIn(MANIFEST), ev.Admitted(), ev.Released()),
    State.ABORTING: (attach(), ev.Abort("why")),
    State.QUARANTINED: (attach(), ev.Abort("why")),
    State.FENCED: (ev.Abort("why"),),
    State.FREE: (ev.Abort("why"), ev.Freed()),
}
EVENTS: tuple[ev.Event, ...] = (
    attach(),
    landed(PARTS[0]),
    ev.ManifestIn(MANIFEST),
    ev.Admitted(),
    ev.Claimed(),
    ev.Released(),
    ev.Abort("again"),
    DONE,
    ev.StreamLost(0),
    ev.WriterDead("reaped"),
    ev.Drained(),
    ev.Freed(),
    ev.Renew(LEASE_S),
    ev.Tick(),
)


def in_state(state: State) -> ReaderSession:
    session = a_session()
    feed(session, *WAY[state])
    if state is State.QUARANTINED:
        feed(session, ev.Tick(), now_s=1.0 + FENCE_S)
    assert session.state is state
    return session


def test_the_way_to_each_state_is_known() -> None:
    assert set(WAY) == set(TRANSITIONS) == set(State)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, EVENTS)), ids=lambda value: str(value)[:24])
def test_an_event_leads_where_the_table_says_or_raises_and_changes_nothing(state: State, event: ev.Event) -> None:
    session = in_state(state)
    before = snapshot(session)

    try:
        session.handle(event, now_s=2.0)
    except ServeError:
        assert snapshot(session) == before
    else:
        assert session.state in TRANSITIONS[state][type(event)]


@pytest.mark.parametrize("state", State)
def test_an_abort_is_legal_in_every_state_and_idempotent(state: State) -> None:
    session = in_state(state)

    feed(session, ev.Abort("first"))
    before = snapshot(session)

    assert feed(session, ev.Abort("second")) == ()
    assert snapshot(session) == before


def test_pages_that_the_scheduler_fills_itself_let_no_writer_in_and_come_back_when_it_lets_go() -> None:
    session = a_session()

    assert feed(session, ev.Claimed()) == ()
    assert session.state is State.ADMITTED
    with pytest.raises(StaleMessageError):
        feed(session, attach())
    (failed,) = feed(session, ev.Abort("client went away"))
    assert failed == ev.Fail("client went away")
    assert feed(session, ev.Released()) == (ev.FreePages(),)


def test_pages_that_a_writer_was_let_into_are_not_for_the_scheduler_to_fill() -> None:
    session = a_session()
    feed(session, attach())

    with pytest.raises(StaleMessageError):
        feed(session, ev.Claimed())


@pytest.mark.parametrize("order", list(itertools.permutations([*map(landed, PARTS), ev.ManifestIn(MANIFEST)])))
def test_it_seals_with_the_last_of_parts_and_manifest_in_any_order(order: tuple[ev.Event, ...]) -> None:
    session = a_session()
    feed(session, attach())

    assert [feed(session, event) for event in order] == [(), (), (), (ev.Admit(),)]


def test_a_manifest_that_overtakes_its_data_admits_nothing() -> None:
    session = a_session()

    assert feed(session, attach(), ev.ManifestIn(MANIFEST)) == ()
    assert session.state is State.RECEIVING


def test_a_ring_seals_only_with_all_its_ranks() -> None:
    session = a_session(ring_size=2)
    feed(session, attach(0), *map(landed, PARTS), ev.ManifestIn(MANIFEST))

    assert feed(session, attach(1)) == (ev.SendAttached(1),)
    assert feed(session, ev.ManifestIn(Manifest(1, ()))) == (ev.Admit(),)


def test_nothing_to_relay_seals_by_the_manifest_alone() -> None:
    session = a_session(resident_tokens=8)

    assert feed(session, attach(), ev.ManifestIn(Manifest(0, (), SampledToken(1)))) == (ev.Admit(),)


OTHER = Part(0, 0, Span(0, 8), 8)
HALF = Part(0, 0, Span(0, 4), 7)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([landed(PARTS[0], verified=False)], "do not match their checksum"),
        ([landed(PARTS[0]), landed(OTHER)], "written twice"),
        ([landed(PARTS[0]), landed(Part(9, 0, Span(0, 8), 7))], "written twice"),
        ([landed(Part(0, 3, Span(0, 8), 7))], "layer 3 of 3"),
        ([landed(Part(0, 0, Span(0, 9), 7))], "outside"),
        ([ev.ManifestIn(MANIFEST), landed(OTHER)], "not what the manifest says"),
        ([landed(OTHER), ev.ManifestIn(MANIFEST)], "not what the manifest says"),
        ([landed(Part(7, 0, Span(0, 8), 7)), ev.ManifestIn(MANIFEST)], "not what the manifest says"),
        ([ev.ManifestIn(Manifest(0, PARTS))], "no first token"),
        ([ev.ManifestIn(Manifest(0, (PARTS[0], PARTS[0]), SampledToken(1)))], "names a part twice"),
        ([landed(HALF), ev.ManifestIn(Manifest(0, (HALF,), SampledToken(1)))], "do not cover"),
        ([ev.Fenced(0, FenceProof.NOTHING_POSTED)], "stopped before its manifest"),
        ([ev.StreamLost(0)], "went away"),
        ([ev.WriterDead("reaped")], "is gone: reaped"),
    ],
)
def test_what_is_wrong_ends_the_request_with_a_reason(events: list[ev.Event], reason: str) -> None:
    session = a_session()

    actions = feed(session, attach(), *events)

    assert session.failure is not None
    assert reason in session.failure
    assert ev.Fail(session.failure) in actions


def test_a_part_announced_twice_alike_is_counted_and_changes_nothing_else() -> None:
    session = in_state(State.RECEIVING)

    assert feed(session, landed(PARTS[0])) == ()

    assert session.num_duplicates == 1
    assert session.landed_tokens == 8


@pytest.mark.parametrize(
    ("event", "error", "reason"),
    [
        (ev.Attach(0, Incarnation("prefill", 8), REQUEST, TOKEN, FINGERPRINT), StaleMessageError, "written by"),
        (ev.Attach(0, WRITER, Request("r", 2), TOKEN, FINGERPRINT), StaleMessageError, "attempt=2"),
        (ev.Attach(0, WRITER, REQUEST, b"guess", FINGERPRINT), StaleMessageError, "wrong token"),
        (ev.Attach(1, WRITER, REQUEST, TOKEN, FINGERPRINT), InvalidRequestError, "rank 1 of a ring of 1"),
        (ev.Attach(0, WRITER, REQUEST, TOKEN, b"other"), LayoutMismatchError, "of the writer"),
    ],
)
def test_only_the_named_writer_attaches(event: ev.Attach, error: type[ServeError], reason: str) -> None:
    session = a_session()

    with pytest.raises(error, match=reason):
        feed(session, event)
    assert session.state is State.RESERVED


def test_pages_wait_for_the_fence_of_every_attached_rank() -> None:
    session = a_session(ring_size=3)
    feed(session, attach(0), attach(1), landed(PARTS[0]))

    assert feed(session, ev.Abort("why")) == (ev.SendAbort(0, "why"), ev.SendAbort(1, "why"), ev.Fail("why"))
    assert feed(session, ev.Fenced(0, FenceProof.CELL_WRITTEN)) == ()
    assert feed(session, ev.Fenced(1, FenceProof.NOTHING_POSTED)) == (ev.FreePages(),)
    assert feed(session, ev.Freed()) == (ev.SendClosed(0), ev.SendClosed(1))


def test_a_reservation_nobody_attached_to_is_freed_at_once() -> None:
    assert feed(a_session(), ev.Abort("why")) == (ev.Fail("why"), ev.FreePages())


def test_an_admitted_request_keeps_its_pages_until_released_and_fenced() -> None:
    session = in_state(State.ADMITTED)

    assert feed(session, ev.Abort("why")) == (ev.Fail("why"),)
    assert feed(session, ev.Released()) == ()
    assert feed(session, DONE) == (ev.FreePages(),)


def test_a_dead_writers_pages_wait_until_our_sockets_are_drained() -> None:
    session = in_state(State.RECEIVING)

    assert feed(session, ev.WriterDead("reaped"))[-1] == ev.Drain()
    assert feed(session, ev.StreamLost(0)) == ()
    assert feed(session, ev.Drained()) == (ev.FreePages(),)


def test_no_rank_reports_its_own_death() -> None:
    with pytest.raises(InvalidRequestError):
        feed(in_state(State.ABORTING), ev.Fenced(0, FenceProof.KNOWN_DEAD))


@pytest.mark.parametrize("state", [State.ABORTING, State.RELEASED])
def test_a_fence_that_is_overdue_quarantines_the_pages_until_it_comes(state: State) -> None:
    session = in_state(state)

    assert feed(session, ev.Tick(), now_s=0.9 + FENCE_S) == ()
    assert feed(session, ev.Tick(), now_s=1.0 + FENCE_S) == (ev.Quarantine(),)
    assert feed(session, DONE, now_s=500.0) == (ev.FreePages(),)


def test_a_part_that_never_lands_is_missed_once_its_writer_has_seen_all_writes_end() -> None:
    session = in_state(State.RECEIVING)
    feed(session, ev.ManifestIn(MANIFEST), DONE, now_s=5.0)
    assert feed(session, landed(PARTS[1]), now_s=6.0) == ()
    assert feed(session, ev.Tick(), now_s=7.9) == ()

    assert ev.Fail(f"rank 0: 1 of its {len(PARTS)} parts never landed") in feed(session, ev.Tick(), now_s=8.0)


def test_a_part_that_waits_to_be_verified_is_not_missed() -> None:
    session = in_state(State.RECEIVING)
    feed(session, ev.ManifestIn(MANIFEST), DONE, now_s=5.0)

    assert feed(session, ev.Tick(caught_up_s=6.9), now_s=9.0) == ()
    feed(session, ev.Tick(caught_up_s=7.0), now_s=9.1)
    assert session.failure is not None


def test_a_lease_ends_it_unless_renewed_and_not_once_admitted() -> None:
    session = in_state(State.ATTACHED)
    feed(session, ev.Renew(LEASE_S), now_s=LEASE_S - 1)
    assert feed(session, ev.Tick(), now_s=LEASE_S + 1) == ()
    assert ev.Fail("the holder's lease has run out") in feed(session, ev.Tick(), now_s=2 * LEASE_S)

    assert feed(in_state(State.ADMITTED), ev.Tick(), now_s=1000.0) == ()


def test_the_deadline_ends_it_however_often_it_is_renewed() -> None:
    session = in_state(State.ATTACHED)
    feed(session, ev.Renew(LEASE_S), now_s=DEADLINE_S - 1)

    assert ev.Fail("the hand-off's time is over") in feed(session, ev.Tick(), now_s=DEADLINE_S)


def test_a_stream_that_breaks_after_its_fence_fails_nothing() -> None:
    session = in_state(State.RECEIVING)
    feed(session, ev.ManifestIn(MANIFEST), DONE, ev.StreamLost(0))

    assert session.state is State.RECEIVING
    assert feed(session, landed(PARTS[1]), landed(PARTS[2])) == (ev.Admit(),)
