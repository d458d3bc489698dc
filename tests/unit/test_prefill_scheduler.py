"""Requirements of kvrelay.prefill_node.scheduler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.shard import Span
from kvrelay.prefill_node.scheduler import MOST_PAUSED, ChunkScheduler, NextChunk, chunks_of


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


def paused(sched: ChunkScheduler, request_id: str, *, left: float = 0.5, took_s: float = 1.0) -> str | None:
    """Pause the chunk in work for a request; return whose chunk is next."""
    chunk = sched.next_chunk()
    assert chunk is not None
    sched.paused(chunk, took_s, left=left, favoured=request_id)
    return next_of(sched)


def next_of(sched: ChunkScheduler) -> str | None:
    chunk = sched.next_chunk()
    return None if chunk is None else chunk.request_id


def test_a_paused_chunk_goes_on_behind_the_one_it_was_paused_for() -> None:
    sched = ChunkScheduler(chunk_tokens=1000)
    sched.add("long", Span(0, 2500))
    first = sched.next_chunk()
    assert first == NextChunk("long", Span(0, 1000), is_last=False)
    sched.add("short", Span(0, 1900))  # not so short that it would be next by its tokens

    sched.paused(first, 1.0, left=0.5, favoured="short")

    assert next_of(sched) == "short"
    assert sched.tokens_left() == 2000 + 1900
    assert turns(sched, 2) == ["short", "short"]

    assert sched.next_chunk() == NextChunk("long", Span(0, 1000), is_last=False, resumes=True)
    sched.ran(NextChunk("long", Span(0, 1000), is_last=False, resumes=True))
    assert sched.tokens_left() == 1500


def test_whoever_was_favoured_and_does_not_come_is_not_waited_for() -> None:
    sched = ChunkScheduler(chunk_tokens=1000)
    sched.add("long", Span(0, 2500))
    assert paused(sched, "refused") == "long"


def test_beside_a_paused_chunk_only_what_is_clearly_shorter_begins() -> None:
    sched = ChunkScheduler(chunk_tokens=1000)
    sched.add("long", Span(0, 1000))
    sched.add("other", Span(0, 9000))
    assert paused(sched, "nobody", left=0.8) == "long"
    sched.add("no shorter", Span(0, 700))
    assert next_of(sched) == "long"
    sched.add("short", Span(0, 300))
    assert next_of(sched) == "short"


def test_a_fair_turn_beside_a_paused_chunk_is_that_chunk_s() -> None:
    sched = ChunkScheduler(chunk_tokens=1000, fair_every=4)
    sched.add("longest", Span(0, 9000))
    sched.add("long", Span(0, 1000))
    assert paused(sched, "nobody") == "long"
    for number in range(9):
        sched.add(f"short{number}", Span(0, 10))

    assert turns(sched, 3) == ["short0", "short1", "long"]


@given(pauses=st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_a_long_prompt_is_not_starved_by_ever_new_ones_that_are_paused_at_each_fair_turn(pauses: list[int]) -> None:
    sched = ChunkScheduler(chunk_tokens=1000, fair_every=4)
    sched.add("long", Span(0, 10_000))
    for number in range(16):
        sched.add(name := f"medium{number}", Span(0, 400))
        for layer in range(pauses[number % len(pauses)]):
            chunk = sched.next_chunk()
            assert chunk is not None
            if chunk.request_id == "long":
                return
            sched.add(f"short{number}.{layer}", Span(0, 10))
            sched.paused(chunk, 0.1, left=0.9 - layer / 10, favoured=f"short{number}.{layer}")
            assert turns(sched, 1) == [f"short{number}.{layer}"]
        if turns(sched, 1) == ["long"]:
            return
        assert next_of(sched) == "long" or name not in sched._running
    raise AssertionError("sixteen others came first")


def test_no_more_chunks_are_paused_than_memory_is_meant_for() -> None:
    sched = ChunkScheduler(chunk_tokens=1000)
    sched.add("0", Span(0, 1000))
    for number in range(MOST_PAUSED):
        assert sched.may_pause(str(number))
        chunk = sched.next_chunk()
        assert chunk is not None
        sched.add(str(number + 1), Span(0, 1000 // 4 ** (number + 1)))
        sched.paused(chunk, 1.0, left=0.9, favoured=str(number + 1))
    assert not sched.may_pause(str(MOST_PAUSED))
    assert sched.may_pause("0")  # which is one of them


def test_a_chunk_that_the_ranks_have_lost_begins_anew() -> None:
    sched = ChunkScheduler(chunk_tokens=1000)
    sched.add("long", Span(0, 2000))
    paused(sched, "nobody")
    chunk = sched.next_chunk()
    assert chunk is not None
    assert chunk.resumes

    sched.lost(chunk)

    assert sched.next_chunk() == NextChunk("long", Span(0, 1000), is_last=False)
    assert sched.tokens_left() == 2000


def test_a_request_may_go_while_its_chunk_is_paused_or_in_work() -> None:
    sched = ChunkScheduler(chunk_tokens=1000)
    sched.add("long", Span(0, 2000))
    chunk = sched.next_chunk()
    assert chunk is not None
    sched.remove("long")
    sched.paused(chunk, 1.0, left=0.5, favoured=None)
    sched.lost(chunk)
    assert sched.next_chunk() is None

    sched.add("long", Span(0, 2000))
    paused(sched, "nobody")
    sched.remove("long")
    assert sched.next_chunk() is None


@given(
    long_s=st.floats(0.05, 20.0),
    arrivals=st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.01, 1.5)), max_size=60),
    layer_s=st.floats(0.01, 0.2),
)
def test_a_long_chunk_has_a_quarter_of_the_time_however_many_short_ones_come(
    long_s: float, arrivals: list[tuple[float, float]], layer_s: float
) -> None:
    """Played with a leader that pauses whenever it may: the long one always has a quarter, but for one short turn."""
    sched = ChunkScheduler(chunk_tokens=10**6, fair_every=4)
    sched.add("long", Span(0, 10**6))
    now_s, done_s, longest_short_s = 0.0, 0.0, 0.0
    coming, at_s = [], 0.0
    for number, (gap_s, took_s) in enumerate(arrivals):
        at_s += gap_s
        coming.append((at_s, f"short{number}", took_s))
        longest_short_s = max(longest_short_s, took_s)
    lengths = {name: took_s for _, name, took_s in coming}
    while (chunk := sched.next_chunk()) is not None:
        if chunk.request_id != "long":
            now_s += lengths[chunk.request_id]
            sched.ran(chunk, lengths[chunk.request_id])
        else:
            ran_s, favoured, left_s = 0.0, None, long_s - done_s
            while favoured is None and ran_s < left_s:
                ran_s = min(ran_s + layer_s, left_s)
                here = [name for at_s, name, _ in coming if at_s <= now_s + ran_s]
                waiting = [one.key for one in sched.waiting_beside("long")] + here
                if waiting and ran_s >= sched.owed_s("long"):
                    favoured = waiting[0]
            now_s, done_s = now_s + ran_s, long_s if ran_s == left_s else done_s + ran_s
            if done_s == long_s:
                sched.ran(chunk, ran_s)
            else:
                sched.paused(chunk, ran_s, left=1 - done_s / long_s, favoured=favoured)
        for one in [one for one in coming if one[0] <= now_s]:
            coming.remove(one)
            sched.add(one[1], Span(0, 10))
        if done_s < long_s:
            # Three turns pass between two fair ones, and the debt of the last one may not be paid yet.
            assert done_s >= now_s / 4 - 3 * longest_short_s - layer_s
