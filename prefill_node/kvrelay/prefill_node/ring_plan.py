"""Who attends, stores and relays what in one chunk: pure functions of the chunk, the ring and the block table.

Every rank computes the same answers from the same broadcast, so no rank ever asks another one what comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.core import shard
from kvrelay.core.shard import Span

Rows = npt.NDArray[np.int64]  # row numbers of a block, or slots (page * page_tokens + row) of a pool


@dataclass(frozen=True, slots=True)
class Pair:
    """One call of the attention kernel: own query rows against rows of one block."""

    queries: Span  # row numbers among this rank's rows of the chunk
    keys: Span  # row numbers of the block
    causal: bool  # both are the same positions: row i sees rows 0..i

    @property
    def num_scores(self) -> int:
        """Query-key pairs that are computed."""
        rows = self.queries.num_tokens
        return rows * (rows + 1) // 2 if self.causal else rows * self.keys.num_tokens

    def blocks(self, most_tokens: int) -> Iterator[Pair]:
        """Yield pairs of at most `most_tokens` queries and keys each that together are this one."""
        for query in _cuts(self.queries, most_tokens):
            last_key = self.keys.end
            if self.causal:
                shift = self.keys.start - self.queries.start
                last_key = query.start + shift
                yield Pair(query, Span(last_key, query.end + shift), causal=True)
            if last_key > self.keys.start:
                earlier = _cuts(Span(self.keys.start, last_key), most_tokens)
                yield from (Pair(query, keys, causal=False) for keys in earlier)


class PageTable:
    """Where the pages of one prompt lie: prompt page k is page pages[k] of rank owners[k]'s pool, for good."""

    def __init__(self, *, prompt_tokens: int, page_tokens: int) -> None:
        num_pages = -(-prompt_tokens // page_tokens)
        self.page_tokens = page_tokens
        self.owners = np.full(num_pages, -1, dtype=np.int32)  # -1: not known yet
        self.pages: Rows = np.zeros(num_pages, dtype=np.int64)

    def fill(self, *, prompt_page: int, rank: int, first_page: int, num_pages: int) -> None:
        """Learn that prompt pages from `prompt_page` on are `num_pages` neighbours of one rank's pool."""
        where = slice(prompt_page, prompt_page + num_pages)
        assert (self.owners[where] == -1).all(), f"prompt page {prompt_page} has an owner already"
        self.owners[where] = rank
        self.pages[where] = np.arange(first_page, first_page + num_pages)


def rank_spans(chunk: Span, *, ring_size: int, align_tokens: int) -> tuple[tuple[Span, ...], ...]:
    """Return, per rank, the positions it computes: at most two spans, never empty ones, adjacent ones joined."""
    return tuple(
        _joined(shard.owned(chunk, rank=rank, ring_size=ring_size, align_tokens=align_tokens))
        for rank in range(ring_size)
    )


def visible_pairs(queries: Sequence[Span], keys: Sequence[Span]) -> tuple[Pair, ...]:
    """Return the kernel calls by which own spans attend the spans of one block, both in position order.

    A key span is visible whole when it ends before the query span, causally when it is the same span, and not at all
    when it comes later; zigzag spans overlap in no other way.
    """
    pairs: list[Pair] = []
    first_query = 0
    for query in queries:
        query_rows = Span(first_query, first_query + query.num_tokens)
        whole, first_key = 0, 0
        for key in keys:
            if key.end <= query.start:
                whole = first_key + key.num_tokens
            elif key == query:
                pairs.append(Pair(query_rows, Span(first_key, first_key + key.num_tokens), causal=True))
            else:
                assert key.start >= query.end, f"{key} overlaps {query}"
            first_key += key.num_tokens
        if whole:
            _append_joined(pairs, Pair(query_rows, Span(0, whole), causal=False))
        first_query = query_rows.end
    return tuple(pairs)


def num_owned(table: PageTable, end: int, *, ring_size: int) -> list[int]:
    """Return how many of the positions before `end` each rank's pages hold."""
    num_pages = -(-end // table.page_tokens)
    owners = table.owners[:num_pages]
    counts: list[int] = (np.bincount(owners, minlength=ring_size) * table.page_tokens).tolist()
    if num_pages:
        counts[owners[-1]] -= num_pages * table.page_tokens - end  # of the last page, which may be filled in part
    return counts


def owned_slots(table: PageTable, end: int, *, rank: int) -> Rows:
    """Return the pool slots of one rank that hold positions before `end`, in position order."""
    num_pages = -(-end // table.page_tokens)
    pages = table.pages[:num_pages][table.owners[:num_pages] == rank]
    slots = _slots(pages, table.page_tokens)
    if num_pages and table.owners[num_pages - 1] == rank:
        slots = slots[: len(slots) - (num_pages * table.page_tokens - end)]
    return slots


def slots_of(table: PageTable, tokens: Span, *, rank: int) -> Rows | None:
    """Return where the positions of a span lie in a rank's pool, in order; None when some do not."""
    first, end = tokens.start // table.page_tokens, -(-tokens.end // table.page_tokens)
    if not (table.owners[first:end] == rank).all():
        return None
    slots = _slots(table.pages[first:end], table.page_tokens)
    skipped = tokens.start - first * table.page_tokens
    return slots[skipped : skipped + tokens.num_tokens]


def _slots(pages: Rows, page_tokens: int) -> Rows:
    """Return the slots of whole pages, in order."""
    slots: Rows = (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)
    return slots


@dataclass(frozen=True, slots=True)
class Stored:
    """Which rows of one rank's block belong in this rank's pages."""

    rows: Rows
    slots: Rows


def stored_rows(table: PageTable, block: Sequence[Span], *, rank: int) -> Stored:
    """Return what `rank` keeps of a block whose rows are the positions of `block` in order."""
    positions = positions_of(block)
    (rows,) = np.nonzero(table.owners[positions // table.page_tokens] == rank)
    mine = positions[rows]
    slots = table.pages[mine // table.page_tokens] * table.page_tokens + mine % table.page_tokens
    return Stored(rows.astype(np.int64), slots)


def positions_of(spans: Sequence[Span]) -> Rows:
    """Return the positions of spans, in order."""
    parts = [np.arange(span.start, span.end, dtype=np.int64) for span in spans]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def intersections(left: Sequence[Span], right: Sequence[Span]) -> tuple[Span, ...]:
    """Return the non-empty overlaps of two lists of spans, in position order."""
    overlaps = (a.intersect(b) for a in left for b in right)
    return tuple(sorted((span for span in overlaps if span is not None), key=lambda span: span.start))


def assign_pages(
    chunk: Span, num_assigned: Sequence[int], *, ring_size: int, align_tokens: int, page_tokens: int, first_page: int
) -> list[int]:
    """Return the owner rank of each prompt page that `chunk` begins to fill, from page `first_page` on.

    A page goes to a rank that computes some of its tokens, so with aligned chunks no row is ever stored away from
    where it was computed; among several to the one that holds the fewest pages of the request.

    Args:
        num_assigned: pages of this request that each rank holds so far.
    """
    counts = list(num_assigned)
    spans = shard.cut(chunk, ring_size=ring_size, align_tokens=align_tokens)
    owners: list[int] = []
    first_span, page, end_page = 0, first_page, -(-chunk.end // page_tokens)
    while page < end_page:
        while spans[first_span].end <= page * page_tokens:
            first_span += 1
        span_end = spans[first_span].end
        inside = (end_page if span_end == chunk.end else span_end // page_tokens) - page
        if inside > 0:  # pages of one span only
            owner = _rank_of(first_span, ring_size)
        else:
            last_span, inside = first_span, 1
            while spans[last_span].end < min((page + 1) * page_tokens, chunk.end):
                last_span += 1
            computing = {
                _rank_of(index, ring_size) for index in range(first_span, last_span + 1) if spans[index].num_tokens
            }
            owner = min(computing, key=lambda rank: (counts[rank], rank))
        counts[owner] += inside
        owners += [owner] * inside
        page += inside
    return owners


def _rank_of(span: int, ring_size: int) -> int:
    return min(span, 2 * ring_size - 1 - span)


def _cuts(span: Span, most_tokens: int) -> Iterator[Span]:
    for start in range(span.start, span.end, most_tokens):
        yield Span(start, min(start + most_tokens, span.end))


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in spans:
        if not span.num_tokens:
            continue
        if joined and joined[-1].end == span.start:
            joined[-1] = Span(joined[-1].start, span.end)
        else:
            joined.append(span)
    return tuple(joined)


def _append_joined(pairs: list[Pair], pair: Pair) -> None:
    # Two query spans that see the same keys become one call: "all queries x front half" of the zigzag.
    last = pairs[-1] if pairs else None
    if last and not last.causal and last.keys == pair.keys and last.queries.end == pair.queries.start:
        pairs[-1] = Pair(Span(last.queries.start, pair.queries.end), pair.keys, causal=False)
    else:
        pairs.append(pair)
