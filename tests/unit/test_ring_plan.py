"""Requirements of kvrelay.prefill_node.ring_plan: who attends, stores and relays what."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.shard import Span
from kvrelay.kv_transfer.plan import owned_ranges
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.ring_plan import Pair

CHUNKS = st.builds(lambda start, size: Span(start, start + size), st.integers(0, 300), st.integers(1, 400))
RINGS = st.integers(1, 5)
ALIGNS = st.sampled_from([1, 16, 64])
PAGE_TOKENS = 16


def positions(spans: tuple[Span, ...]) -> list[int]:
    return [position for span in spans for position in range(span.start, span.end)]


def a_table(owners: list[int], page_tokens: int = PAGE_TOKENS) -> ring_plan.PageTable:
    """Return a table in which prompt page k is page k of its owner's pool."""
    table = ring_plan.PageTable(prompt_tokens=len(owners) * page_tokens, page_tokens=page_tokens)
    for page, rank in enumerate(owners):
        table.fill(prompt_page=page, rank=rank, first_page=page, num_pages=1)
    return table


@given(chunk=CHUNKS, ring_size=RINGS, align=ALIGNS)
def test_every_visible_pair_is_attended_once_and_no_other(chunk: Span, ring_size: int, align: int) -> None:
    spans = ring_plan.rank_spans(chunk, ring_size=ring_size, align_tokens=align)
    seen = np.zeros((chunk.num_tokens, chunk.num_tokens), dtype=np.int64)
    for own in spans:
        for block in spans:
            for pair in ring_plan.visible_pairs(own, block):
                rows = np.array(positions(own)[pair.queries.start : pair.queries.end]) - chunk.start
                keys = np.array(positions(block)[pair.keys.start : pair.keys.end]) - chunk.start
                mask = np.tril(np.ones((len(rows), len(keys)), dtype=np.int64)) if pair.causal else 1
                seen[np.ix_(rows, keys)] += mask
                assert pair.num_scores == np.sum(np.broadcast_to(mask, (len(rows), len(keys))))

    assert (seen == np.tril(np.ones_like(seen))).all()


def test_a_lower_rank_is_seen_by_all_queries_and_a_higher_one_by_the_back_half() -> None:
    spans = ring_plan.rank_spans(Span(0, 60), ring_size=3, align_tokens=1)

    (from_lower,) = ring_plan.visible_pairs(spans[1], spans[0])
    (from_higher,) = ring_plan.visible_pairs(spans[1], spans[2])

    assert (from_lower.queries, from_lower.keys) == (Span(0, 20), Span(0, 10))
    assert (from_higher.queries, from_higher.keys) == (Span(10, 20), Span(0, 20))


@given(ring_size=st.integers(2, 5))
def test_score_pairs_are_equal_on_all_ranks(ring_size: int) -> None:
    spans = ring_plan.rank_spans(Span(0, 2048), ring_size=ring_size, align_tokens=1)
    work = [sum(pair.num_scores for block in spans for pair in ring_plan.visible_pairs(own, block)) for own in spans]

    assert sum(work) == 2048 * 2049 // 2
    assert max(work) <= 1.05 * sum(work) / ring_size


@given(ring_size=RINGS, align=ALIGNS, chunk_tokens=st.integers(1, 150), prompt=st.integers(1, 400))
def test_every_row_is_stored_exactly_once_by_the_owner_of_its_page(
    ring_size: int, align: int, chunk_tokens: int, prompt: int
) -> None:
    owners: list[int] = []
    chunks = [Span(start, min(start + chunk_tokens, prompt)) for start in range(0, prompt, chunk_tokens)]
    stored = np.zeros(prompt, dtype=np.int64)
    for chunk in chunks:
        counts = [owners.count(rank) for rank in range(ring_size)]
        owners += ring_plan.assign_pages(
            chunk, counts, ring_size=ring_size, align_tokens=align, page_tokens=PAGE_TOKENS, first_page=len(owners)
        )
        table = a_table(owners)
        spans = ring_plan.rank_spans(chunk, ring_size=ring_size, align_tokens=align)
        for rank in range(ring_size):
            for block in spans:
                kept = ring_plan.stored_rows(table, block, rank=rank)
                where = np.array(positions(block), dtype=np.int64)[kept.rows]
                stored[where] += 1
                assert (table.owners[where // PAGE_TOKENS] == rank).all()
                assert (kept.slots == where).all()  # page numbers equal prompt pages here

    assert (stored == 1).all()
    assert len(owners) == -(-prompt // PAGE_TOKENS)


@given(ring_size=RINGS, chunk=CHUNKS)
def test_with_aligned_chunks_no_row_is_stored_away_from_where_it_was_computed(ring_size: int, chunk: Span) -> None:
    whole = Span(chunk.start // 64 * 64, chunk.end)
    first_page = whole.start // 64
    owners = ring_plan.assign_pages(
        whole, [0] * ring_size, ring_size=ring_size, align_tokens=64, page_tokens=64, first_page=first_page
    )
    table = a_table([-1] * first_page + owners, page_tokens=64)
    spans = ring_plan.rank_spans(whole, ring_size=ring_size, align_tokens=64)

    for rank in range(ring_size):
        assert positions(owned_ranges(whole, table.owners.tolist(), rank=rank, page_tokens=64)) == positions(
            spans[rank]
        )


@given(owners=st.lists(st.integers(0, 2), min_size=1, max_size=20), data=st.data())
def test_owned_ranges_and_slots_cover_each_position_for_exactly_one_rank(
    owners: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(owners) * PAGE_TOKENS - 1))
    end = data.draw(st.integers(start + 1, len(owners) * PAGE_TOKENS))
    table = a_table(owners)
    table.pages = table.pages[::-1].copy()
    found: list[int] = []
    for rank in range(3):
        spans = owned_ranges(Span(start, end), owners, rank=rank, page_tokens=PAGE_TOKENS)
        slots = ring_plan.stored_rows(table, (Span(start, end),), rank=rank).slots
        expected = [int(table.pages[p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for p in positions(spans)]
        assert slots.tolist() == expected
        assert all(a.end < b.start for a, b in pairwise(spans))
        found += positions(spans)

    assert sorted(found) == list(range(start, end))


@given(owners=st.lists(st.integers(0, 2), min_size=1, max_size=20), data=st.data())
def test_the_positions_before_a_chunk_are_counted_and_found_page_by_page(
    owners: list[int], data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, len(owners) * PAGE_TOKENS))
    table = a_table(owners)
    expected = [ring_plan.stored_rows(table, (Span(0, end),), rank=rank).slots.tolist() for rank in range(3)]

    assert [ring_plan.owned_slots(table, end, rank=rank).tolist() for rank in range(3)] == expected
    assert ring_plan.num_owned(table, end, ring_size=3) == [len(slots) for slots in expected]


def test_pages_are_spread_so_that_no_rank_holds_many_more_than_its_share() -> None:
    owners: list[int] = []
    for start in range(0, 6400, 100):
        counts = [owners.count(rank) for rank in range(3)]
        owners += ring_plan.assign_pages(
            Span(start, start + 100), counts, ring_size=3, align_tokens=1, page_tokens=64, first_page=len(owners)
        )

    assert max(owners.count(rank) for rank in range(3)) <= 1.2 * len(owners) / 3


@pytest.mark.parametrize("most_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize(
    "pair", [Pair(Span(4, 14), Span(2, 12), causal=True), Pair(Span(3, 10), Span(5, 16), causal=False)]
)
def test_blocks_of_a_pair_cover_each_of_its_scores_once(pair: Pair, most_tokens: int) -> None:
    seen: list[tuple[int, int]] = []
    for block in pair.blocks(most_tokens):
        assert max(block.queries.num_tokens, block.keys.num_tokens) <= most_tokens
        for query in range(block.queries.start, block.queries.end):
            last = query - block.queries.start + block.keys.start if block.causal else block.keys.end - 1
            seen += [(query, key) for key in range(block.keys.start, last + 1)]

    whole = [
        (query, key)
        for query in range(pair.queries.start, pair.queries.end)
        for key in range(pair.keys.start, pair.keys.end)
        if not pair.causal or key - pair.keys.start <= query - pair.queries.start
    ]
    assert sorted(seen) == whole
