"""The writer's session: when to post, when the sources are free, what was proven."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.errors import StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.core.types import SampledToken
from kvrelay.kv_transfer import writer_table as wt
from kvrelay.kv_transfer.values import FenceProof, Part
from kvrelay.kv_transfer.writer_session import WriterSession
from kvrelay.kv_transfer.writer_table import WRITER_TRANSITIONS, WriterState

PART = Part(0, 0, Span(0, 8), 7)
ADD, SEAL = wt.AddPart(PART), wt.Seal(SampledToken(1), 0)
MINE, THEIRS = wt.GiveUp("mine", tell_reader=True), wt.GiveUp("theirs", tell_reader=False)
CELL = wt.FenceDone(FenceProof.CELL_WRITTEN)
DEADLINE_S, FENCE_S = 100.0, 10.0

WAY: dict[WriterState, tuple[wt.WriterEvent, ...]] = {
    WriterState.PENDING: (ADD,),
    WriterState.ATTACHED: (wt.Attached(),),
    WriterState.POSTING: (wt.Attached(), ADD),
    WriterState.SEALING: (wt.Attached(), ADD, SEAL),
    WriterState.SETTLED: (wt.Attached(), ADD, SEAL, wt.Drained(), wt.Admitted()),
    WriterState.ABORTING: (wt.Attached(), ADD, MINE),
    WriterState.FENCED: (wt.Attached(), ADD, MINE, CELL),
    WriterState.LOST: (wt.Attached(), ADD, MINE, wt.FenceFailed("gone")),
    WriterState.STUCK: (wt.Attached(), ADD, MINE),
}
EVENTS: tuple[wt.WriterEvent, ...] = (
    wt.Attached(), ADD, SEAL, wt.WriteFailed("broken"), wt.Drained(), CELL, wt.FenceFailed("gone"), wt.Admitted(),
    MINE, THEIRS, wt.StreamLost("lost"), wt.Tick(),
)  # fmt: skip


def feed(session: WriterSession, *events: wt.WriterEvent, now_s: float = 1.0) -> tuple[wt.WriterAction, ...]:
    """Return the actions of the last event."""
    actions: tuple[wt.WriterAction, ...] = ()
    for event in events:
        actions = session.handle(event, now_s=now_s)
    return actions


def in_state(state: WriterState) -> WriterSession:
    session = WriterSession("a rank", deadline_s=DEADLINE_S, fence_timeout_s=FENCE_S)
    feed(session, *WAY[state])
    if state is WriterState.STUCK:
        feed(session, wt.Tick(), now_s=1.0 + FENCE_S)
    assert session.state is state
    return session


def snapshot(session: WriterSession) -> dict[str, object]:
    return {**vars(session), "_parts": list(session._parts)}


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(WriterState, EVENTS)), ids=lambda value: str(value)[:24]
)
def test_an_event_leads_where_the_table_says_or_raises_and_changes_nothing(
    state: WriterState, event: wt.WriterEvent
) -> None:
    session = in_state(state)
    before = snapshot(session)

    try:
        session.handle(event, now_s=2.0)
    except StaleMessageError:
        assert snapshot(session) == before
    else:
        assert session.state in WRITER_TRANSITIONS[state][type(event)]


@pytest.mark.parametrize("state", WriterState)
def test_giving_up_is_legal_in_every_state_and_idempotent(state: WriterState) -> None:
    session = in_state(state)

    feed(session, MINE)

    assert feed(session, MINE) == ()


def test_nothing_is_posted_before_decode_says_yes() -> None:
    session = in_state(WriterState.PENDING)

    assert feed(session, SEAL) == ()
    assert feed(session, wt.Attached()) == (
        wt.Post(PART), wt.SendManifest((PART,), SampledToken(1), 0), wt.Finish(),
    )  # fmt: skip


def test_a_sealed_session_takes_no_more_parts() -> None:
    with pytest.raises(StaleMessageError):
        feed(in_state(WriterState.SEALING), ADD)


@pytest.mark.parametrize("order", list(itertools.permutations([wt.Drained(), wt.Admitted()])))
def test_it_settles_with_the_admission_and_the_last_handle_in_any_order(order: tuple[wt.WriterEvent, ...]) -> None:
    session = in_state(WriterState.SEALING)

    assert wt.Settle() not in feed(session, order[0])
    assert feed(session, order[1])[-1] == wt.Settle()


def test_the_sources_are_free_and_the_fence_is_told_as_soon_as_all_handles_are_done() -> None:
    actions = feed(in_state(WriterState.SEALING), wt.Drained())

    assert actions == (wt.SendFenced(FenceProof.HANDLES_DONE), wt.FreeSources())


def test_a_seal_without_parts_needs_no_transfer() -> None:
    assert feed(in_state(WriterState.ATTACHED), SEAL) == (
        wt.SendManifest((), SampledToken(1), 0), wt.SendFenced(FenceProof.NOTHING_POSTED), wt.FreeSources(),
    )  # fmt: skip


@pytest.mark.parametrize("state", [WriterState.PENDING, WriterState.ATTACHED])
def test_giving_up_with_nothing_posted_is_fenced_at_once(state: WriterState) -> None:
    assert feed(in_state(state), MINE) == (
        wt.SendAbort("mine"), wt.SendFenced(FenceProof.NOTHING_POSTED), wt.FreeSources(), wt.Fail("mine"),
    )  # fmt: skip


@pytest.mark.parametrize("event", [THEIRS, wt.StreamLost("theirs")])
def test_giving_up_with_writes_posted_fences_and_keeps_the_sources(event: wt.WriterEvent) -> None:
    session = in_state(WriterState.POSTING)

    assert feed(session, event) == (wt.StopAndFence(),)
    assert feed(session, CELL) == (wt.SendFenced(FenceProof.CELL_WRITTEN), wt.Fail("theirs"))
    assert feed(session, wt.Drained()) == (wt.FreeSources(),)


def test_one_write_that_fails_ends_the_whole_and_tells_decode() -> None:
    assert feed(in_state(WriterState.POSTING), wt.WriteFailed("broken")) == (
        wt.SendAbort("broken"), wt.StopAndFence(),
    )  # fmt: skip


def test_a_peer_that_is_gone_fails_it_and_frees_the_sources_when_the_handles_ended() -> None:
    session = in_state(WriterState.ABORTING)

    assert feed(session, wt.FenceFailed("gone")) == (wt.Fail("mine; no fence: gone"),)
    assert feed(session, wt.Drained()) == (wt.FreeSources(),)


def test_a_stuck_writer_says_its_fence_when_it_comes_after_all() -> None:
    session = in_state(WriterState.STUCK)
    assert feed(session, CELL, now_s=99.0) == (wt.SendFenced(FenceProof.CELL_WRITTEN),)
    assert feed(session, wt.FenceFailed("gone"), now_s=99.0) == ()


def test_a_writer_without_a_fence_says_the_end_of_its_link_and_stays_lost() -> None:
    session = in_state(WriterState.LOST)

    assert feed(session, wt.FenceDone(FenceProof.LINK_CLOSED)) == (wt.SendFenced(FenceProof.LINK_CLOSED),)
    assert session.state is WriterState.LOST


def test_a_peer_that_does_nothing_leaves_it_stuck_in_bounded_time() -> None:
    session = in_state(WriterState.ABORTING)

    assert feed(session, wt.Tick(), now_s=0.9 + FENCE_S) == ()
    assert feed(session, wt.Tick(), now_s=1.0 + FENCE_S) == (wt.Fail("mine; no fence within 10 s", stuck=True),)


def test_the_deadline_ends_it() -> None:
    assert feed(in_state(WriterState.SEALING), wt.Tick(), now_s=DEADLINE_S)[0] == (
        wt.SendAbort("the hand-off's time is over")
    )


@given(events=st.lists(st.sampled_from(EVENTS), max_size=30))
def test_it_ends_once_and_never_frees_sources_that_a_write_may_read(events: list[wt.WriterEvent]) -> None:
    session = WriterSession("a rank", deadline_s=DEADLINE_S, fence_timeout_s=FENCE_S)
    seen: list[wt.WriterAction] = []
    drained = False
    for event in events:
        drained = drained or isinstance(event, wt.Drained)
        try:
            actions = session.handle(event, now_s=1.0)
        except StaleMessageError:
            continue
        seen += actions
        if wt.FreeSources() in actions:
            assert drained or not any(isinstance(action, wt.Post) for action in seen)

    assert sum(isinstance(action, wt.Settle | wt.Fail) for action in seen) <= 1
