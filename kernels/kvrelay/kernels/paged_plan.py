"""The plan of a decode step as tensors of fixed shape, refilled in place: what a kernel inside a CUDA graph reads.

Work is cut into tiles of `tile_tokens` rows; all sequences' tiles stand in one line, and a kernel gives each of its
parts an equal stretch of that line, so ragged lengths balance by themselves.

Shapes in this file: B sequences the plan has room for, P pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvrelay.core.errors import CapacityError

MAX_SEQUENCES = 1024
MAX_TILE_TOKENS = 32  # by measurement: two programs per processor fit, each with loads of two tiles in flight


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Buffers of one batch size; never reallocated, so a captured graph may keep their addresses."""

    page_table_BP: Tensor  # int32, pages in token order; entries behind a sequence's end are not read
    lengths_B: Tensor  # int32, visible rows, this step's included; 0 = no sequence here
    slots_B: Tensor  # int64, where this step's row is written; -1 = no sequence here
    starts_B1: Tensor  # int32 [B + 1], first tile of each sequence in the line of all tiles; then their number
    page_tokens: int
    tile_tokens: int
    derived: dict[str, Any] = field(default_factory=dict)  # what a backend works out once per step; emptied by refresh_

    @classmethod
    def allocate(cls, *, num_sequences: int, max_pages: int, page_tokens: int, device: torch.device) -> PagedPlan:
        """Make a plan with room for `num_sequences` sequences of `max_pages` pages; all are empty.

        Raises:
            CapacityError: more sequences than one plan takes.
        """
        if not 0 < num_sequences <= MAX_SEQUENCES:
            raise CapacityError(f"{num_sequences} sequences in one plan, 1 to {MAX_SEQUENCES} possible")
        return cls(
            page_table_BP=torch.zeros(num_sequences, max_pages, dtype=torch.int32, device=device),
            lengths_B=torch.zeros(num_sequences, dtype=torch.int32, device=device),
            slots_B=torch.full((num_sequences,), -1, dtype=torch.int64, device=device),
            starts_B1=torch.zeros(num_sequences + 1, dtype=torch.int32, device=device),
            page_tokens=page_tokens,
            tile_tokens=min(page_tokens, MAX_TILE_TOKENS),
        )

    @property
    def num_sequences(self) -> int:
        return self.lengths_B.shape[0]

    def update_(self, page_tables: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Refill all buffers from the host: two copies and one launch, no device memory is allocated.

        Args:
            page_tables: one int64 or int32 CPU tensor per sequence, its pages in token order; at most `num_sequences`.
            lengths: visible rows per sequence, this step's row included; at least 1.

        Raises:
            CapacityError: more sequences, or a longer one, than the plan has room for.
        """
        room, max_pages = self.page_table_BP.shape
        longest = max((-(-length // self.page_tokens) for length in lengths), default=0)
        if len(lengths) > room or longest > max_pages:
            raise CapacityError(f"{len(lengths)} sequences of up to {longest} pages, room for {room} of {max_pages}")
        pinned = self.page_table_BP.device.type == "cuda"
        table_BP = torch.zeros(room, longest, dtype=torch.int32, pin_memory=pinned)
        lengths_B = torch.zeros(room, dtype=torch.int32, pin_memory=pinned)
        for row, (table, length) in enumerate(zip(page_tables, lengths, strict=True)):
            count = -(-length // self.page_tokens)
            table_BP[row, :count] = table[:count]
            lengths_B[row] = length
        self.page_table_BP[:, :longest].copy_(table_BP, non_blocking=True)
        self.lengths_B.copy_(lengths_B, non_blocking=True)
        self.refresh_()

    def refresh_(self) -> None:
        """Work out starts and slots from `page_table_BP` and `lengths_B`, on the device: one launch, capturable.

        Call it after either was written, before the first layer of a step.
        """
        from kvrelay.kernels.triton_plan import refresh  # noqa: PLC0415 - Triton is needed for paged plans alone

        self.derived.clear()
        refresh(self)
