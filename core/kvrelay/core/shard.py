"""Zigzag placement of a chunk's tokens over a ring, and its inverse.

A chunk [start, end) is cut into 2R consecutive spans; rank r owns span r and span 2R-1-r, so causal work is equal on
all ranks and rank 0 always owns the last token. Positions, not storage order, decide visibility.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive token positions [start, end) of one request."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_pairs(self) -> float:
        """Pairs of one of these tokens and one that it sees; a token counts half with itself."""
        return self.num_tokens * self.start + self.num_tokens * self.num_tokens / 2

    def intersect(self, other: Span) -> Span | None:
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Span(start, end) if start < end else None


def cut(chunk: Span, *, ring_size: int, align_tokens: int = 1) -> tuple[Span, ...]:
    """Return the 2R spans of a chunk in position order; some may be empty, the last never is.

    Args:
        chunk: at least one token.
        align_tokens: inner boundaries fall on absolute positions that are multiples of this (64 on GPUs, so that
            no page is split between ranks; 1 on CPUs).
    """
    assert chunk.num_tokens > 0, "an empty chunk has no spans"
    parts = 2 * ring_size
    first_unit, last_unit = chunk.start // align_tokens, -(-chunk.end // align_tokens)
    units = last_unit - first_unit
    bounds = [
        min(max((first_unit + index * units // parts) * align_tokens, chunk.start), chunk.end) for index in range(parts)
    ]
    bounds.append(chunk.end)
    return tuple(Span(bounds[index], bounds[index + 1]) for index in range(parts))


def owned(chunk: Span, *, rank: int, ring_size: int, align_tokens: int = 1) -> tuple[Span, Span]:
    """Return the two spans (front, back) of one rank, in position order."""
    spans = cut(chunk, ring_size=ring_size, align_tokens=align_tokens)
    return spans[rank], spans[2 * ring_size - 1 - rank]
