"""Starts and slots of a paged plan, in one launch.

Shapes in this file: B sequences the plan has room for, P pages of the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from kvrelay.kernels.paged_plan import PagedPlan


def refresh(plan: PagedPlan) -> None:
    """Write `starts_B1` and `slots_B` from table and lengths."""
    _refresh[(1,)](
        plan.page_table_BP,
        plan.lengths_B,
        plan.slots_B,
        plan.starts_B1,
        plan.num_sequences,
        plan.page_table_BP.stride(0),
        PAGE=plan.page_tokens,
        TILE=plan.tile_tokens,
        BLOCK=triton.next_power_of_2(plan.num_sequences),
    )


@triton.jit
def _refresh(
    table_ptr,
    lengths_ptr,
    slots_ptr,
    starts_ptr,
    num_sequences,
    table_stride,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq_B = tl.arange(0, BLOCK)
    here_B = seq_B < num_sequences
    length_B = tl.load(lengths_ptr + seq_B, here_B, other=0)
    ends_B = tl.cumsum((length_B + TILE - 1) // TILE)
    tl.store(starts_ptr + seq_B + 1, ends_B, here_B)
    tl.store(starts_ptr + seq_B, tl.zeros_like(ends_B), seq_B == 0)
    last_B = tl.maximum(length_B - 1, 0)
    page_B = tl.load(table_ptr + seq_B.to(tl.int64) * table_stride + last_B // PAGE, length_B > 0, other=0)
    slot_B = page_B.to(tl.int64) * PAGE + last_B % PAGE
    tl.store(slots_ptr + seq_B, tl.where(length_B > 0, slot_B, -1), here_B)
