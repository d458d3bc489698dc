"""Routed experts for few tokens: a decode step reads each expert that is hit once, straight from memory.

Every program owns some columns of one expert and multiplies the rows of all tokens with them, since that costs nothing
beside reading the weights; only tokens that chose the expert are stored. So nothing is sorted or gathered beforehand.

Shapes in this file: T tokens, D hidden, E experts, I expert width, K experts per token, A = T * K pairs,
M tokens of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.grouped_experts import FEW_TOKENS
from kvrelay.kernels.triton_layer import combine


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernels are compiled, by measurement on an H200."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tuning_for(tokens: int) -> Tuning:
    if tokens <= 16:
        return Tuning(columns=32 if tokens <= 4 else 64, depth=128, num_warps=4, num_stages=3)
    return Tuning(columns=64, depth=128, num_warps=4, num_stages=3)


def few_tokens_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up_E2ID: Tensor,
    down_EDI: Tensor,
    *,
    into_TD: Tensor | None = None,
) -> Tensor:
    """Contract of `grouped_experts.grouped_experts`, for at most FEW_TOKENS tokens."""
    (tokens, hidden), (num_experts, _, width) = x_TD.shape, down_EDI.shape
    top = experts_TK.shape[1]
    assert tokens <= FEW_TOKENS, f"{tokens} tokens, at most {FEW_TOKENS}"
    gated_AI = x_TD.new_empty(tokens * top, width)
    out_AD = x_TD.new_empty(tokens * top, hidden)
    tuning = tuning_for(tokens)
    columns = tuning.columns
    rows = max(16, triton.next_power_of_2(tokens))  # 16 is the least that the matrix units take
    _gate_up_kernel[(triton.cdiv(width, columns), num_experts)](
        x_TD, experts_TK, gate_up_E2ID, gated_AI, tokens, top, hidden, width,
        M=rows, K=triton.next_power_of_2(top), COLUMNS=columns, DEPTH=tuning.depth, num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, columns), num_experts)](
        gated_AI, experts_TK, down_EDI, out_AD, tokens, top, hidden, width,
        M=rows, K=triton.next_power_of_2(top), COLUMNS=columns, DEPTH=tuning.depth, num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip
    return combine(out_AD, None, weights_TK, into_TD=into_TD)


@triton.jit
def _pairs_with(ids_ptr, expert, tokens, top, M: tl.constexpr, K: tl.constexpr):
    """Return for each token its pair with an expert, and whether there is one."""
    token_M = tl.arange(0, M)
    place_K = tl.arange(0, K)
    here_MK = (token_M < tokens)[:, None] & (place_K < top)[None, :]
    pair_MK = token_M[:, None] * top + place_K[None, :]
    hit_MK = tl.load(ids_ptr + pair_MK, here_MK, other=-1) == expert
    return tl.sum(tl.where(hit_MK, pair_MK, 0), 1), tl.sum(hit_MK.to(tl.int32), 1) > 0


@triton.jit
def _gate_up_kernel(
    x_ptr, ids_ptr, weight_ptr, out_ptr, tokens, top, hidden, width,
    M: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    pair_M, hit_M = _pairs_with(ids_ptr, expert, tokens, top, M, K)
    if tl.max(hit_M.to(tl.int32), 0) > 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        gate_ptr = weight_ptr + expert.to(tl.int64) * 2 * width * hidden + column.to(tl.int64)[None, :] * hidden
        up_ptr = gate_ptr + width.to(tl.int64) * hidden
        rows_ptr = x_ptr + tl.arange(0, M)[:, None] * hidden
        depth = tl.arange(0, DEPTH)
        gate = tl.zeros([M, COLUMNS], dtype=tl.float32)
        up = tl.zeros([M, COLUMNS], dtype=tl.float32)
        for start in range(0, hidden, DEPTH):
            place = start + depth
            x = tl.load(rows_ptr + place[None, :], mask=hit_M[:, None] & (place < hidden)[None, :], other=0.0)
            mask = (place < hidden)[:, None] & inside[None, :]
            gate = tl.dot(x, tl.load(gate_ptr + place[:, None], mask=mask, other=0.0), gate)
            up = tl.dot(x, tl.load(up_ptr + place[:, None], mask=mask, other=0.0), up)
        # As the other paths do: the product's halves are rounded before they are gated.
        gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        gated = gate / (1 + tl.exp(-gate)) * up
        target = out_ptr + pair_M.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(target, gated.to(out_ptr.dtype.element_ty), mask=hit_M[:, None] & inside[None, :])


@triton.jit
def _down_kernel(
    gated_ptr, ids_ptr, weight_ptr, out_ptr, tokens, top, hidden, width,
    M: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    pair_M, hit_M = _pairs_with(ids_ptr, expert, tokens, top, M, K)
    if tl.max(hit_M.to(tl.int32), 0) > 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < hidden
        down_ptr = weight_ptr + expert.to(tl.int64) * hidden * width + column.to(tl.int64)[None, :] * width
        rows_ptr = gated_ptr + pair_M.to(tl.int64)[:, None] * width
        depth = tl.arange(0, DEPTH)
        total = tl.zeros([M, COLUMNS], dtype=tl.float32)
        for start in range(0, width, DEPTH):
            place = start + depth
            x = tl.load(rows_ptr + place[None, :], mask=hit_M[:, None] & (place < width)[None, :], other=0.0)
            mask = (place < width)[:, None] & inside[None, :]
            total = tl.dot(x, tl.load(down_ptr + place[:, None], mask=mask, other=0.0), total)
        target = out_ptr + pair_M.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=hit_M[:, None] & inside[None, :])
