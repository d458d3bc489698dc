"""Copies and ranges against a plain row-by-row definition."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span
from kvrelay.kv_transfer.plan import Copy, cut_part, owned_ranges, part_ranges

LAYOUT = PageLayout(
    num_layers=3, latent_width=6, rope_width=2, dtype="bfloat16", model_id="m", page_tokens=4, block_tokens=4
)
ROW = LAYOUT.row_bytes
POOL = 40
pages_of = st.permutations(list(range(POOL))).map(lambda pages: pages[:10])
spans = st.tuples(st.integers(0, 39), st.integers(1, 40)).map(lambda s: Span(s[0], min(40, s[0] + s[1])))


def offset(layer: int, pages: list[int], token: int) -> int:
    return LAYOUT.offset_bytes(
        layer=layer, page=pages[token // LAYOUT.page_tokens], row=token % LAYOUT.page_tokens, num_pages=POOL
    )


@given(tokens=spans, layer=st.integers(0, 2), src=pages_of, dst=pages_of)
def test_copies_move_each_row_of_the_part_and_nothing_else(
    tokens: Span, layer: int, src: list[int], dst: list[int]
) -> None:
    copies = cut_part(
        layout=LAYOUT,
        layer=layer,
        tokens=tokens,
        src_pages=src,
        src_pool_pages=POOL,
        dst_pages=dst,
        dst_pool_pages=POOL,
    )

    moved = [
        (copy.src_offset_bytes + at, copy.dst_offset_bytes + at)
        for copy in copies
        for at in range(0, copy.num_bytes, ROW)
    ]
    assert moved == [(offset(layer, src, t), offset(layer, dst, t)) for t in range(tokens.start, tokens.end)]


@given(tokens=spans, layer=st.integers(0, 2), pages=pages_of)
def test_ranges_name_the_rows_in_token_order(tokens: Span, layer: int, pages: list[int]) -> None:
    ranges = part_ranges(layout=LAYOUT, layer=layer, tokens=tokens, pages=pages, pool_pages=POOL)

    rows = [at + step for at, num_bytes in ranges for step in range(0, num_bytes, ROW)]
    assert rows == [offset(layer, pages, t) for t in range(tokens.start, tokens.end)]


def test_pages_that_are_neighbours_on_both_sides_are_one_copy() -> None:
    copies = cut_part(
        layout=LAYOUT,
        layer=1,
        tokens=Span(2, 18),
        src_pages=range(5, 15),
        src_pool_pages=POOL,
        dst_pages=[7, 8, 20, 21, 22],
        dst_pool_pages=POOL,
    )

    page = LAYOUT.page_bytes
    assert copies == (
        Copy((POOL + 5) * page + 2 * ROW, (POOL + 7) * page + 2 * ROW, 6 * ROW),
        Copy((POOL + 7) * page, (POOL + 20) * page, 10 * ROW),
    )


@given(chunk=spans, owners=st.lists(st.integers(0, 2), min_size=10, max_size=10))
def test_owned_ranges_split_a_chunk_between_the_ranks(chunk: Span, owners: list[int]) -> None:
    by_rank = [owned_ranges(chunk, owners, rank=rank, page_tokens=4) for rank in range(3)]

    positions = sorted(t for ranges in by_rank for span in ranges for t in range(span.start, span.end))
    assert positions == list(range(chunk.start, chunk.end))
    for rank, ranges in enumerate(by_rank):
        assert all(owners[t // 4] == rank for span in ranges for t in range(span.start, span.end))
        assert all(left.end < right.start for left, right in itertools.pairwise(ranges))
