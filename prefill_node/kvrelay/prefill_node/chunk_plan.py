"""Everything the layers of one chunk share on one rank, worked out once: laps, what is kept, what leaves when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.core.shard import Span
from kvrelay.kv_transfer.plan import owned_ranges
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.device_queue import to_device
from kvrelay.prefill_node.ring import Kept, Lap
from kvrelay.prefill_node.ring_plan import PageTable, Pair, Rows


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    positions_T: Rows  # of this rank's rows, in order; empty when it has none
    laps: Sequence[Lap]  # the chunk itself first, then the earlier tokens
    own_kept: Kept | None  # own rows that stay here
    early: Sequence[Span]  # computed and stored here: they leave before or beside the attention
    late: Sequence[Span]  # computed elsewhere, stored here: they leave after the layer's ring


class ChunkPlanner:
    def __init__(
        self, *, rank: int, ring_size: int, align_tokens: int, ring_block_tokens: int, device: torch.device
    ) -> None:
        """
        Args:
            align_tokens: see `kvrelay.core.shard.cut`.
            ring_block_tokens: most rows per rank of one lap over earlier tokens.
            device: of the latent pool.
        """
        self._rank = rank
        self._size = ring_size
        self._align_tokens = align_tokens
        self._ring_block_tokens = ring_block_tokens
        self._device = device

    def plan(self, table: PageTable, chunk: Span) -> ChunkPlan:
        """Return this rank's plan; the pages of the chunk and of everything before it are in `table`."""
        rank, size = self._rank, self._size
        spans = ring_plan.rank_spans(chunk, ring_size=size, align_tokens=self._align_tokens)
        mine = owned_ranges(chunk, table.owners, rank=rank, page_tokens=table.page_tokens)
        foreign = [span for source in range(size) if source != rank for span in spans[source]]
        kept = [self._kept(table, block) for block in spans]
        chunk_lap = Lap(
            num_rows=[sum(span.num_tokens for span in block) for block in spans],
            pairs=[ring_plan.visible_pairs(spans[rank], block) for block in spans],
            kept=[None if source == rank else kept[source] for source in range(size)],
        )
        return ChunkPlan(
            positions_T=ring_plan.positions_of(spans[rank]),
            laps=[chunk_lap, *self._earlier_laps(table, chunk, chunk_lap.num_rows[rank])],
            own_kept=kept[rank],
            early=ring_plan.intersections(mine, spans[rank]),
            late=ring_plan.intersections(mine, foreign),
        )

    def _earlier_laps(self, table: PageTable, chunk: Span, num_queries: int) -> list[Lap]:
        """Return laps over the positions before the chunk: each rank's rows in sub-blocks, seen whole by all."""
        if not chunk.start:
            return []
        limit = self._ring_block_tokens
        # Of the other ranks only the numbers are needed; slot by slot, a long prompt's chunks would cost its square.
        owned = ring_plan.num_owned(table, chunk.start, ring_size=self._size)
        own_slots = to_device(ring_plan.owned_slots(table, chunk.start, rank=self._rank), self._device)
        laps = []
        for start in range(0, max(owned), limit):
            num_rows = [max(min(number - start, limit), 0) for number in owned]
            pairs = [
                (Pair(Span(0, num_queries), Span(0, rows), causal=False),) if rows and num_queries else ()
                for rows in num_rows
            ]
            laps.append(Lap(num_rows, pairs, [None] * self._size, own_slots=own_slots[start : start + limit]))
        return laps

    def _kept(self, table: PageTable, block: Sequence[Span]) -> Kept | None:
        if len(block) == 1 and (slots := ring_plan.slots_of(table, block[0], rank=self._rank)) is not None:
            return Kept(None, to_device(slots, self._device))
        stored = ring_plan.stored_rows(table, block, rank=self._rank)
        if not len(stored.rows):
            return None
        is_whole = len(stored.rows) == sum(span.num_tokens for span in block)
        rows = None if is_whole else to_device(stored.rows, self._device)
        return Kept(rows, to_device(stored.slots, self._device))
