"""Copies and ranges against a plain row-by-row definition."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span
from kvrelay.kv_transfer.plan import Copy, PartRanges, Route, Routes, owned_ranges, part_ranges

LAYOUT = PageLayout(
    num_layers=3, latent_width=6, rope_width=2, dtype="bfloat16", model_id="m", page_tokens=4, block_tokens=4
)
ROW = LAYOUT.row_bytes
POOL, OTHER_POOL = 40, 47
pages_of = st.permutations(list(range(POOL))).map(lambda pages: pages[:10])
spans = st.tuples(st.integers(0, 39), st.integers(1, 40)).map(lambda s: Span(s[0], min(40, s[0] + s[1])))


def offset(layer: int, pages: list[int], token: int, *, pool_pages: int = POOL) -> int:
    return LAYOUT.offset_bytes(
        layer=layer, page=pages[token // LAYOUT.page_tokens], row=token % LAYOUT.page_tokens, num_pages=pool_pages
    )


@given(tokens=spans, layer=st.integers(0, 2), src=pages_of, dst=pages_of)
def test_copies_move_each_row_of_the_part_and_nothing_else(
    tokens: Span, layer: int, src: list[int], dst: list[int]
) -> None:
    route = Route.of(
        layout=LAYOUT,
        tokens=tokens,
        src_pages=src,
        src_pool_pages=POOL,
        dst_pages=dst,
        dst_pool_pages=OTHER_POOL,
    )
    copies = route.copies(layer)

    moved = [
        (copy.src_offset_bytes + at, copy.dst_offset_bytes + at)
        for copy in copies
        for at in range(0, copy.num_bytes, ROW)
    ]
    assert moved == [
        (offset(layer, src, t), offset(layer, dst, t, pool_pages=OTHER_POOL)) for t in range(tokens.start, tokens.end)
    ]
    assert route.ranges(layer) == part_ranges(layout=LAYOUT, layer=layer, tokens=tokens, pages=src, pool_pages=POOL)


@given(tokens=spans, layer=st.integers(0, 2), pages=pages_of)
def test_ranges_name_the_rows_in_token_order(tokens: Span, layer: int, pages: list[int]) -> None:
    ranges = part_ranges(layout=LAYOUT, layer=layer, tokens=tokens, pages=pages, pool_pages=POOL)

    rows = [at + step for at, num_bytes in ranges for step in range(0, num_bytes, ROW)]
    assert rows == [offset(layer, pages, t) for t in range(tokens.start, tokens.end)]
    remembered = PartRanges(LAYOUT, pages=pages, pool_pages=POOL)
    assert [remembered.of(layer, tokens), remembered.of(layer, tokens)] == [ranges, ranges]


def test_pages_that_are_neighbours_on_both_sides_are_one_copy() -> None:
    route = Route.of(
        layout=LAYOUT,
        tokens=Span(2, 18),
        src_pages=range(5, 15),
        src_pool_pages=POOL,
        dst_pages=[7, 8, 20, 21, 22],
        dst_pool_pages=POOL,
    )

    page = LAYOUT.page_bytes
    assert route.copies(1) == (
        Copy((POOL + 5) * page + 2 * ROW, (POOL + 7) * page + 2 * ROW, 6 * ROW),
        Copy((POOL + 7) * page, (POOL + 20) * page, 10 * ROW),
    )


def test_the_pages_of_a_range_are_walked_for_its_first_layer_only() -> None:
    routes = Routes(LAYOUT, src_pool_pages=POOL, dst_pages=range(10), dst_pool_pages=OTHER_POOL)
    first = routes.of(Span(0, 12), [3, 9, 4])

    assert routes.of(Span(0, 12), [3, 9, 4]) is first
    assert routes.of(Span(12, 16), {3: 5}).copies(0) == (
        Copy(5 * LAYOUT.page_bytes, 3 * LAYOUT.page_bytes, LAYOUT.page_bytes),
    )


@given(chunk=spans, owners=st.lists(st.integers(0, 2), min_size=10, max_size=10))
def test_owned_ranges_split_a_chunk_between_the_ranks(chunk: Span, owners: list[int]) -> None:
    by_rank = [owned_ranges(chunk, owners, rank=rank, page_tokens=4) for rank in range(3)]

    positions = sorted(t for ranges in by_rank for span in ranges for t in range(span.start, span.end))
    assert positions == list(range(chunk.start, chunk.end))
    for rank, ranges in enumerate(by_rank):
        assert all(owners[t // 4] == rank for span in ranges for t in range(span.start, span.end))
        assert all(left.end < right.start for left, right in itertools.pairwise(ranges))
