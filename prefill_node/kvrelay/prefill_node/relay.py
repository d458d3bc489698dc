"""Cuts one rank's rows of one request into parts, as soon as they are final. It moves nothing itself.

A part is one layer's rows of one contiguous token range whose pages this rank owns; tokens that decode has already are
left out. Cached pages that decode lacks wait in a backlog, from which bounded portions leave between layers, so that
they delay neither the compute nor the new rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvrelay.core.shard import Span
from kvrelay.core.types import SampledToken
from kvrelay.kv_transfer.plan import Pages, owned_ranges
from kvrelay.prefill_node.ring_plan import PageTable

# One portion of backlog: at 10 GB/s of checksums and 1 KiB rows well under a millisecond.
PORTION_TOKENS = 8192


class PartWriter(Protocol):
    """What the relay needs of a WriterEndpoint. Called on the step thread."""

    def add_part(self, layer: int, tokens: Span, src_pages: Pages) -> None:
        """Checksum rows that are final and queue their write; src_pages names the page of each prompt page."""
        ...

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        """Say that every part was added."""
        ...


class Relay:
    """This rank's outgoing parts of one request."""

    def __init__(
        self, writer: PartWriter, table: PageTable, *, rank: int, resident_tokens: int, num_layers: int
    ) -> None:
        self._writer = writer
        self._table = table
        self._rank = rank
        self._resident_tokens = resident_tokens
        self._num_layers = num_layers
        self._backlog: deque[tuple[int, Span]] = deque()
        self._seal_with: tuple[SampledToken | None, int] | None = None
        self.sealed = False

    def queue_cached(self, cached_tokens: int) -> None:
        """Put the cached rows that decode lacks on the backlog, layer by layer."""
        spans = self._portions(Span(0, cached_tokens))
        self._backlog.extend((layer, span) for layer in range(self._num_layers) for span in spans)

    def rows_final(self, layer: int, spans: Sequence[Span]) -> None:
        """Send rows of one layer that are in this rank's pages and will not change."""
        for span in spans:
            wanted = span.intersect(Span(self._resident_tokens, span.end))
            if wanted is not None:
                self._add(layer, wanted)

    def pump(self, portions: int = 1) -> None:
        """Send some of the backlog; seal when it was the last thing that was missing."""
        for _ in range(min(portions, len(self._backlog))):
            layer, span = self._backlog.popleft()
            self._add(layer, span)
        if self._seal_with is not None and not self._backlog and not self.sealed:
            self.sealed = True
            first_token, cached_tokens = self._seal_with
            self._writer.seal(first_token=first_token, cached_tokens=cached_tokens)

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        """Seal as soon as the backlog is empty; `pump` must go on being called until `sealed`."""
        self._seal_with = (first_token, cached_tokens)
        self.pump()

    @property
    def pending(self) -> bool:
        """`pump` has something left to do now."""
        return bool(self._backlog)

    def _add(self, layer: int, tokens: Span) -> None:
        self._writer.add_part(layer, tokens, self._table.pages)

    def _portions(self, tokens: Span) -> list[Span]:
        wanted = tokens.intersect(Span(self._resident_tokens, tokens.end))
        if wanted is None:
            return []
        owned = owned_ranges(wanted, self._table.owners, rank=self._rank, page_tokens=self._table.page_tokens)
        return [
            Span(start, min(start + PORTION_TOKENS, span.end))
            for span in owned
            for start in range(span.start, span.end, PORTION_TOKENS)
        ]
