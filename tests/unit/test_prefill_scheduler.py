"""Requirements of kvrelay.prefill_node.scheduler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.shard import Span
from kvrelay.prefill_node.scheduler import ChunkScheduler, chunks_of


def turns(sched: ChunkScheduler, number: int) -> list[str]:
    served = []
    for _ in range(number):
        chunk = sched.next_chunk()
        if chunk is None:
            break
        sched.ran(chunk)
        served.append(chunk.request_id)
    return served


@given(chunks_before=st.integers(0, 15))
def test_a_short_request_behind_a_long_one_waits_for_two_chunks_at_most(chunks_before: int) -> None:
    sched = ChunkScheduler(chunk_tokens=1000)
    sched.add("long", Span(0, 16_000))
    assert turns(sched, chunks_before) == ["long"] * chunks_before
    in_work = sched.next_chunk()
    assert in_work is not None

    sched.add("short", Span(0, 100))
    sched.ran(in_work)

    assert "short" in turns(sched, 2)


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    sched = ChunkScheduler(chunk_tokens=1000, fair_every=4)
    sched.add("long", Span(0, 10_000))
    long_turns = 0
    for number in range(40):
        sched.add(f"short{number}", Span(0, 100))
        long_turns += turns(sched, 1) == ["long"]

    assert long_turns >= 5


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    chunk_tokens=st.integers(1, 200),
    fair_every=st.integers(2, 6),
)
def test_each_token_is_scheduled_once_in_order_and_nobody_waits_longer_than_the_bound(
    sizes: list[int], chunk_tokens: int, fair_every: int
) -> None:
    sched = ChunkScheduler(chunk_tokens=chunk_tokens, fair_every=fair_every)
    for number, size in enumerate(sizes):
        sched.add(str(number), Span(number, number + size))
    seen: dict[str, list[Span]] = {str(number): [] for number in range(len(sizes))}
    last_turn = dict.fromkeys(seen, 0)
    turn = 0
    while (chunk := sched.next_chunk()) is not None:
        turn += 1
        seen[chunk.request_id].append(chunk.tokens)
        assert turn - last_turn[chunk.request_id] <= fair_every * len(sizes)
        last_turn[chunk.request_id] = turn
        assert chunk.is_last == (chunk.tokens.end == int(chunk.request_id) + sizes[int(chunk.request_id)])
        sched.ran(chunk)

    for number, size in enumerate(sizes):
        assert seen[str(number)] == chunks_of(Span(number, number + size), chunk_tokens=chunk_tokens)
    assert sched.tokens_left() == 0


def test_a_cancelled_request_leaves_at_once_even_while_its_chunk_is_in_work() -> None:
    sched = ChunkScheduler(chunk_tokens=10)
    sched.add("a", Span(0, 30))
    chunk = sched.next_chunk()
    assert chunk is not None

    sched.remove("a")
    sched.ran(chunk)

    assert sched.next_chunk() is None
    sched.remove("a")
