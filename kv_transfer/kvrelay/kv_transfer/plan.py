"""Token ranges to byte ranges: what one part copies from where to where, and what its checksum covers.

Page k of a prompt holds tokens [k * page_tokens, (k + 1) * page_tokens) on both sides, so a piece of a page on one
side is the same piece of a page on the other; only the page numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span

Pages = Mapping[int, int] | Sequence[int]  # prompt page -> page of a pool
Ranges = tuple[tuple[int, int], ...]  # (offset_bytes, num_bytes) of a pool


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous piece of writing; offsets count from the base of each side's pool."""

    src_offset_bytes: int
    dst_offset_bytes: int
    num_bytes: int


CopyTable = npt.NDArray[np.int64]  # one row per copy: source offset, target offset, bytes


class Copies(Sequence[Copy]):
    """Copies as one table: a part may be a thousand pages, and a Python object for each would cost more than to
    move them."""

    def __init__(self, table: CopyTable) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> Copies: ...
    def __getitem__(self, index: int | slice) -> Copy | Copies:
        if isinstance(index, slice):
            return Copies(self.table[index])
        src, dst, num_bytes = self.table[index].tolist()
        return Copy(src, dst, num_bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # holds an array


def table_of(copies: Sequence[Copy]) -> CopyTable:
    """Return copies as a table [N, 3]."""
    if isinstance(copies, Copies):
        return copies.table
    rows = [(copy.src_offset_bytes, copy.dst_offset_bytes, copy.num_bytes) for copy in copies]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where the rows of one token range lie in both pools, for every layer.

    Layers differ only by their slab, so the pages are walked once and not again for each layer.
    """

    src_ranges: Ranges  # (offset_bytes, num_bytes) in layer 0
    first_copies: CopyTable  # those of layer 0
    src_slab_bytes: int
    dst_slab_bytes: int

    @classmethod
    def of(
        cls,
        *,
        layout: PageLayout,
        tokens: Span,
        src_pages: Pages,
        src_pool_pages: int,
        dst_pages: Pages,
        dst_pool_pages: int,
    ) -> Route:
        """Plan the copies of a token range in token order; neighbours are merged where both sides are contiguous.

        Merging matters: a descriptor costs about 5 us to post, and one page of 73,728 bytes goes at a thirtieth of
        the speed of a large piece (7-8.5 against 226-282 GB/s over NVLink).

        Args:
            src_pages, dst_pages: page of the pool for each prompt page that `tokens` touches.
            src_pool_pages, dst_pool_pages: pages per layer slab of each pool.
        """
        copies: list[Copy] = []
        for page, row, num_bytes in _pieces(layout, tokens):
            src = layout.offset_bytes(layer=0, page=src_pages[page], row=row, num_pages=src_pool_pages)
            dst = layout.offset_bytes(layer=0, page=dst_pages[page], row=row, num_pages=dst_pool_pages)
            last = copies[-1] if copies else None
            if (
                last is not None
                and last.src_offset_bytes + last.num_bytes == src
                and last.dst_offset_bytes + last.num_bytes == dst
            ):
                copies[-1] = Copy(last.src_offset_bytes, last.dst_offset_bytes, last.num_bytes + num_bytes)
            else:
                copies.append(Copy(src, dst, num_bytes))
        ranges = part_ranges(layout=layout, layer=0, tokens=tokens, pages=src_pages, pool_pages=src_pool_pages)
        table = table_of(copies)
        return cls(ranges, table, src_pool_pages * layout.page_bytes, dst_pool_pages * layout.page_bytes)

    def ranges(self, layer: int) -> Ranges:
        """Return `part_ranges` of the source pool in this layer."""
        return _in_layer(self.src_ranges, layer * self.src_slab_bytes)

    def copies(self, layer: int) -> Copies:
        """Return the copies of the part of this layer."""
        step = np.array((layer * self.src_slab_bytes, layer * self.dst_slab_bytes, 0), dtype=np.int64)
        return Copies(self.first_copies + step)


class Routes:
    """The routes of one hand-off, each planned when its token range is first named."""

    def __init__(self, layout: PageLayout, *, src_pool_pages: int, dst_pages: Pages, dst_pool_pages: int) -> None:
        self._layout = layout
        self._src_pool_pages = src_pool_pages
        self._dst_pages = dst_pages
        self._dst_pool_pages = dst_pool_pages
        self._routes: dict[Span, Route] = {}

    def of(self, tokens: Span, src_pages: Pages) -> Route:
        """Return the route of a token range; its pages must be those of the first time."""
        route = self._routes.get(tokens)
        if route is None:
            route = self._routes[tokens] = Route.of(
                layout=self._layout,
                tokens=tokens,
                src_pages=src_pages,
                src_pool_pages=self._src_pool_pages,
                dst_pages=self._dst_pages,
                dst_pool_pages=self._dst_pool_pages,
            )
        return route


class PartRanges:
    """Where the parts of one prompt lie in one pool; a token range is walked when it is first named, not per layer."""

    def __init__(self, layout: PageLayout, *, pages: Pages, pool_pages: int) -> None:
        self._layout, self._pages, self._pool_pages = layout, pages, pool_pages
        self._first_layer: dict[Span, Ranges] = {}

    def of(self, layer: int, tokens: Span) -> Ranges:
        """Return `part_ranges`."""
        ranges = self._first_layer.get(tokens)
        if ranges is None:
            ranges = self._first_layer[tokens] = part_ranges(
                layout=self._layout, layer=0, tokens=tokens, pages=self._pages, pool_pages=self._pool_pages
            )
        return _in_layer(ranges, layer * self._pool_pages * self._layout.page_bytes)


def part_ranges(*, layout: PageLayout, layer: int, tokens: Span, pages: Pages, pool_pages: int) -> Ranges:
    """Return (offset_bytes, num_bytes) of a part's rows in one pool, in token order, neighbours merged."""
    ranges: list[tuple[int, int]] = []
    for page, row, num_bytes in _pieces(layout, tokens):
        offset = layout.offset_bytes(layer=layer, page=pages[page], row=row, num_pages=pool_pages)
        if ranges and sum(ranges[-1]) == offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + num_bytes)
        else:
            ranges.append((offset, num_bytes))
    return tuple(ranges)


def owned_ranges(chunk: Span, owner_of_page: Sequence[int], *, rank: int, page_tokens: int) -> tuple[Span, ...]:
    """Return the longest spans of `chunk` whose pages `rank` holds, in position order.

    Args:
        owner_of_page: rank that holds each prompt page.
    """
    spans: list[Span] = []
    for page in range(chunk.start // page_tokens, -(-chunk.end // page_tokens)):
        if owner_of_page[page] != rank:
            continue
        inside = Span(page * page_tokens, (page + 1) * page_tokens).intersect(chunk)
        assert inside is not None, "the loop visits only pages that the chunk touches"
        if spans and spans[-1].end == inside.start:
            spans[-1] = Span(spans[-1].start, inside.end)
        else:
            spans.append(inside)
    return tuple(spans)


def _in_layer(ranges: Ranges, step_bytes: int) -> Ranges:
    return tuple((offset + step_bytes, num_bytes) for offset, num_bytes in ranges)


def _pieces(layout: PageLayout, tokens: Span) -> Iterator[tuple[int, int, int]]:
    """Yield (prompt page, first row, bytes) of the pieces of pages that `tokens` covers."""
    position = tokens.start
    while position < tokens.end:
        page, row = divmod(position, layout.page_tokens)
        rows = min(layout.page_tokens - row, tokens.end - position)
        yield page, row, rows * layout.row_bytes
        position += rows
