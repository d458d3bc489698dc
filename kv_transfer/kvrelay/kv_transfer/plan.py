"""Token ranges to byte ranges: what one part copies from where to where, and what its checksum covers.

Page k of a prompt holds tokens [k * page_tokens, (k + 1) * page_tokens) on both sides, so a piece of a page on one
side is the same piece of a page on the other; only the page numbers differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span

Numbers = npt.NDArray[np.int64]
Pages = Mapping[int, int] | Sequence[int] | Numbers  # prompt page -> page of a pool
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
        the speed of a large piece (7-8.5 against 226-282 GB/s over NVLink). All pages are planned at once: it is done
        beside a prompt's first layer, when a device has nothing else to do yet.

        Args:
            src_pages, dst_pages: page of the pool for each prompt page that `tokens` touches.
            src_pool_pages, dst_pool_pages: pages per layer slab of each pool.
        """
        pieces = _Pieces.of(layout, tokens)
        src, dst = pieces.offsets_bytes(src_pages), pieces.offsets_bytes(dst_pages)
        sizes = pieces.num_bytes
        firsts = firsts_of_merged((src[:-1] + sizes[:-1] == src[1:]) & (dst[:-1] + sizes[:-1] == dst[1:]))
        table = np.stack((src[firsts], dst[firsts], np.add.reduceat(sizes, firsts)), axis=1)
        return cls(_merged(src, sizes), table, src_pool_pages * layout.page_bytes, dst_pool_pages * layout.page_bytes)

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
    pieces = _Pieces.of(layout, tokens)
    return _merged(pieces.offsets_bytes(pages) + layer * pool_pages * layout.page_bytes, pieces.num_bytes)


def owned_ranges(
    chunk: Span, owner_of_page: Sequence[int] | npt.NDArray[np.int32], *, rank: int, page_tokens: int
) -> tuple[Span, ...]:
    """Return the longest spans of `chunk` whose pages `rank` holds, in position order.

    Args:
        owner_of_page: rank that holds each prompt page.
    """
    first, end = chunk.start // page_tokens, -(-chunk.end // page_tokens)
    is_ours = np.zeros(end - first + 2, dtype=np.bool_)  # with a page of another one on both sides
    is_ours[1:-1] = np.asarray(owner_of_page[first:end]) == rank
    edges = ((np.flatnonzero(is_ours[1:] != is_ours[:-1]) + first) * page_tokens).tolist()
    return tuple(
        Span(max(start, chunk.start), min(stop, chunk.end)) for start, stop in zip(edges[::2], edges[1::2], strict=True)
    )


def _in_layer(ranges: Ranges, step_bytes: int) -> Ranges:
    return tuple((offset + step_bytes, num_bytes) for offset, num_bytes in ranges)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The pieces of pages that a token range covers, in token order; never empty."""

    layout: PageLayout
    first_page: int
    skipped_bytes: Numbers  # of its page, before each piece
    num_bytes: Numbers

    @classmethod
    def of(cls, layout: PageLayout, tokens: Span) -> _Pieces:
        first_page, end_page = tokens.start // layout.page_tokens, layout.pages_for(tokens.end)
        starts = np.arange(first_page, end_page) * layout.page_tokens
        begins, ends = np.maximum(starts, tokens.start), np.minimum(starts + layout.page_tokens, tokens.end)
        return cls(layout, first_page, (begins - starts) * layout.row_bytes, (ends - begins) * layout.row_bytes)

    def offsets_bytes(self, pages: Pages) -> Numbers:
        """Return where each piece lies in layer 0 of a pool."""
        end_page = self.first_page + len(self.num_bytes)
        if isinstance(pages, Mapping):
            numbers = np.array([pages[page] for page in range(self.first_page, end_page)], dtype=np.int64)
        else:
            numbers = np.asarray(pages[self.first_page : end_page], dtype=np.int64)
        assert len(numbers) == len(self.num_bytes), f"no page is named for each of [{self.first_page}, {end_page})"
        return numbers * self.layout.page_bytes + self.skipped_bytes


def _merged(offsets_bytes: Numbers, num_bytes: Numbers) -> Ranges:
    """Return pieces as ranges, neighbours merged."""
    firsts = firsts_of_merged(offsets_bytes[:-1] + num_bytes[:-1] == offsets_bytes[1:])
    return tuple(zip(offsets_bytes[firsts].tolist(), np.add.reduceat(num_bytes, firsts).tolist(), strict=True))


def firsts_of_merged(goes_on: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return the numbers of the pieces at which merged ones begin.

    Args:
        goes_on: of each piece but the last: the next one lies right behind it.
    """
    return np.flatnonzero(np.concatenate(([True], ~goes_on)))
