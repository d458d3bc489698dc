"""Attention over latent blocks that rotate round the ring.

Each lap sends one block of every rank once round: first the chunk's own rows, then the rows of earlier tokens in
sub-blocks. A rank re-expands what passes by, attends the part its queries may see, and merges the partial results.
All R - 1 hops of a lap always happen; only work that nobody would see is skipped, never communication.

Shapes in this file: T own tokens of the chunk, B rows of a block, N heads, K query/key width, V value width,
Y elements of a stored row. Blocks travel as pages hold them: every rank attends to the rows that one of them stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.core.errors import RingError
from kvrelay.core.types import Counters
from kvrelay.kernels.merge import merge_in_place
from kvrelay.kernels.mla_prefill import Problem, attend_block, slows_when_long
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.transformer import Layer
from kvrelay.prefill_node.group import Header, Leave, RingGroup
from kvrelay.prefill_node.ring_plan import Pair

# Longer calls are cut where that makes them faster.
BLOCK_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of a passing block that belong in this rank's pages. int64 on the pool's device."""

    rows: Tensor | None  # None: all of the block
    slots: Tensor

    def of(self, block_BY: Tensor) -> Tensor:
        """Return these rows, in the order of their slots."""
        return block_BY if self.rows is None else block_BY.index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class Lap:
    """One block of every rank, once round the ring. Lists are by the rank whose block it is."""

    num_rows: Sequence[int]
    pairs: Sequence[Sequence[Pair]]
    kept: Sequence[Kept | None]  # None: nothing of that block is ours to store
    own_slots: Tensor | None = None  # where this rank's block lies in its pool; None: it is the chunk's own rows


class Ring:
    """This rank's side of the rotation: two receive buffers, the neighbours, and the loop."""

    def __init__(self, group: RingGroup | None, pool: LatentPool, counters: Counters) -> None:
        """`group` is None for a ring of one, which exchanges nothing."""
        self.rank, self.size = (group.rank, group.size) if group else (0, 1)
        self._group = group
        self._pool = pool
        self._counters = counters
        self._buffers: list[Tensor] = []
        counters.values["foreign_blocks_max"] = 0.0

    def attend(
        self, layer: Layer, q_TNK: Tensor | None, own_TY: Tensor, laps: Sequence[Lap], *, header: Header, scale: float
    ) -> tuple[Partial, Leave]:
        """Return attention of the own queries over everything they may see, and what rank 0 says in this layer.

        Args:
            q_TNK: None when this rank has no row in the chunk; it takes part in the rotation all the same.
            own_TY: this rank's rows of the chunk, as the pool stores them.
            header: sent along with the first lap; rank 0's word reaches every rank in that lap, so all ranks leave at
                the same layer. On a stop they do so here, and the result is incomplete.
        Raises:
            RingError: another rank is at another step or layer.
        """
        # A ring of one attends a pair in each lap, which is cut only when it is long.
        merged = Partial(q_TNK, in_fp32=self.size > 1 or len(laps) > 2 or len(own_TY) > BLOCK_TOKENS)
        leave = header.leave if self.rank == 0 else Leave.NO
        for lap in laps:
            chunk_lap = lap.own_slots is None
            block_BY = own_TY if lap.own_slots is None else self._pool.read_stored(header.layer, lap.own_slots)
            passing = header
            for hop in range(self.size):
                source = (self.rank - hop) % self.size
                exchange = None
                if self._group is not None and hop < self.size - 1:
                    incoming_BY = self._buffer(hop % 2, lap, own_TY)[: lap.num_rows[(source - 1) % self.size]]
                    exchange = self._group.post(block_BY, incoming_BY, passing if chunk_lap else None)
                self._note_foreign_blocks(int(hop > 0) + int(exchange is not None))

                self._attend_pairs(layer, block_BY, lap.pairs[source], merged, scale)
                self._keep(header.layer, block_BY, lap.kept[source])

                if exchange is not None:
                    passing = _checked(exchange.wait(), header)
                    block_BY = incoming_BY
                    if chunk_lap and (source - 1) % self.size == 0:
                        leave = passing.leave
            if leave is Leave.STOP:
                break
        return merged, leave

    def _attend_pairs(
        self, layer: Layer, block_BY: Tensor, pairs: Sequence[Pair], merged: Partial, scale: float
    ) -> None:
        if not pairs:
            return
        rows_BW = self._pool.computed(block_BY[: max(pair.keys.end for pair in pairs)])
        if len(pairs) == 1 and not pairs[0].causal:  # every block but a rank's own
            merged.add_rows(pairs[0], layer, rows_BW, scale)
        else:
            k_BNK, v_BNV = layer.expand(rows_BW)
            for pair in pairs:
                merged.add(pair, k_BNK, v_BNV, scale)
        for pair in pairs:
            self._counters.add("attention_pairs", pair.num_scores)

    def _keep(self, layer: int, block_BY: Tensor, kept: Kept | None) -> None:
        if kept is not None:
            self._pool.write_stored(layer, kept.slots, kept.of(block_BY))

    def _buffer(self, which: int, lap: Lap, like: Tensor) -> Tensor:
        """Return one of two receive buffers; a hop reads one (and sends it on) while it fills the other."""
        needed = max(lap.num_rows)
        if not self._buffers or self._buffers[0].shape[0] < needed:
            self._buffers = [like.new_empty((needed, like.shape[1])) for _ in range(2)]
        return self._buffers[which]

    def _note_foreign_blocks(self, number: int) -> None:
        self._counters.values["foreign_blocks_max"] = max(self._counters.values["foreign_blocks_max"], float(number))


class Partial:
    """Attention of T queries over the keys seen so far."""

    def __init__(self, q_TNK: Tensor | None, *, in_fp32: bool = True) -> None:
        """
        Args:
            in_fp32: more than two results may be joined; two are rounded once, like a single engine's.
        """
        self._q_TNK = q_TNK
        self._in_fp32 = in_fp32
        self._out_TNV: Tensor | None = None
        self._lse_TN: Tensor | None = None

    @property
    def out_TNV(self) -> Tensor:
        assert self._out_TNV is not None, "a query always sees at least itself"
        return self._out_TNV

    def add(self, pair: Pair, k_BNK: Tensor, v_BNV: Tensor, scale: float) -> None:
        """Attend one pair over expanded rows and merge it in, block by block where long calls are slow."""
        q_TNK = self._queries(pair)
        problem = Problem(q_TNK.device.type, q_TNK.dtype, q_TNK.shape[-1], v_BNV.shape[-1])
        for block in pair.blocks(BLOCK_TOKENS) if slows_when_long(problem) else (pair,):
            keys = slice(block.keys.start, block.keys.end)
            part = attend_block(self._queries(block), k_BNK[keys], v_BNV[keys], scale=scale, causal=block.causal)
            self._merge(block, *part)

    def add_rows(self, pair: Pair, layer: Layer, rows_BW: Tensor, scale: float) -> None:
        """Attend one pair whose keys are all visible, and merge it in."""
        rows_SW = rows_BW[pair.keys.start : pair.keys.end]
        self._merge(pair, *layer.attend(self._queries(pair), rows_SW, scale=scale))

    def _queries(self, pair: Pair) -> Tensor:
        assert self._q_TNK is not None, "a rank without rows has no pairs"
        return self._q_TNK[pair.queries.start : pair.queries.end]

    def _merge(self, pair: Pair, out: Tensor, lse: Tensor) -> None:
        assert self._q_TNK is not None, "a rank without rows has no pairs"
        rows = slice(pair.queries.start, pair.queries.end)
        if self._out_TNV is None or self._lse_TN is None:
            if out.shape[0] == self._q_TNK.shape[0]:  # all queries: nothing to join yet
                self._out_TNV, self._lse_TN = out, lse
                return
            shape = self._q_TNK.shape[:2]
            self._out_TNV = torch.zeros((*shape, out.shape[2]), dtype=torch.float32, device=out.device)
            self._lse_TN = torch.full(shape, -torch.inf, dtype=torch.float32, device=out.device)
        if self._in_fp32 and self._out_TNV.dtype != torch.float32:
            self._out_TNV = self._out_TNV.float()
        merge_in_place(self._out_TNV[rows], self._lse_TN[rows], out, lse)


def _checked(passing: Header | None, expected: Header) -> Header:
    if passing is None:
        return expected
    if (passing.step_id, passing.layer) != (expected.step_id, expected.layer):
        raise RingError(f"a rank is at {passing} while this one is at {expected}")
    return passing
