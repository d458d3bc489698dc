"""Zigzag placement."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.shard import Span, cut, owned

chunks = st.builds(lambda start, size: Span(start, start + size), st.integers(0, 5_000), st.integers(1, 5_000))
rings = st.integers(1, 8)
aligns = st.sampled_from([1, 16, 64])


@given(chunks, rings, aligns)
def test_spans_cover_the_chunk_once_and_in_order(chunk: Span, ring_size: int, align: int) -> None:
    spans = cut(chunk, ring_size=ring_size, align_tokens=align)

    assert len(spans) == 2 * ring_size
    assert spans[0].start == chunk.start
    assert spans[-1].end == chunk.end
    assert all(left.end == right.start for left, right in itertools.pairwise(spans))


@given(chunks, rings, aligns)
def test_inner_boundaries_are_aligned(chunk: Span, ring_size: int, align: int) -> None:
    for span in cut(chunk, ring_size=ring_size, align_tokens=align)[1:]:
        assert span.start % align == 0 or span.start in (chunk.start, chunk.end)


@given(chunks, rings, aligns)
def test_rank_zero_owns_the_last_token(chunk: Span, ring_size: int, align: int) -> None:
    _, back = owned(chunk, rank=0, ring_size=ring_size, align_tokens=align)

    assert back.end == chunk.end
    assert back.num_tokens > 0


@given(chunks, rings)
def test_causal_work_is_nearly_equal_on_all_ranks(chunk: Span, ring_size: int) -> None:
    def work(rank: int) -> int:
        spans = owned(chunk, rank=rank, ring_size=ring_size)
        return sum(position + 1 for span in spans for position in range(span.start, span.end))

    loads = [work(rank) for rank in range(ring_size)]

    # A rank's two spans may each hold one token more or less than another's.
    assert max(loads) - min(loads) <= 3 * chunk.end
