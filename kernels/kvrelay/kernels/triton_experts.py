"""Routed experts for few tokens: a decode step reads each expert that is hit once, straight from memory.

Every program owns some columns of one expert and finds that expert's pairs itself, so nothing is sorted beforehand.

Shapes in this file: T tokens, D hidden, E experts, I expert width, K experts per token, A = T * K pairs,
M pairs of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.triton_layer import combine

MAX_PAIRS = 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernels are compiled, by measurement on an H200."""

    pairs: int  # of a tile: an expert's weights are read once for each; 16 is the least that the matrix units take
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tuning_for(tokens: int) -> Tuning:
    if tokens <= 16:
        return Tuning(pairs=16, columns=32 if tokens <= 4 else 64, depth=128, num_warps=4, num_stages=3)
    return Tuning(pairs=32, columns=64, depth=64, num_warps=4, num_stages=4)


def few_tokens_experts(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_E2ID: Tensor, down_EDI: Tensor
) -> Tensor:
    """Contract of `grouped_experts.grouped_experts`, for at most MAX_PAIRS pairs."""
    (tokens, hidden), (num_experts, _, width) = x_TD.shape, down_EDI.shape
    top = experts_TK.shape[1]
    pairs = tokens * top
    assert pairs <= MAX_PAIRS, f"{pairs} pairs, at most {MAX_PAIRS}"
    gated_AI = x_TD.new_empty(pairs, width)
    out_AD = x_TD.new_empty(pairs, hidden)
    pair_block = max(16, triton.next_power_of_2(pairs))
    tuning = tuning_for(tokens)
    columns = tuning.columns
    _gate_up_kernel[(triton.cdiv(width, columns), num_experts)](
        x_TD, experts_TK, gate_up_E2ID, gated_AI, pairs, top, hidden, width,
        M=tuning.pairs, PAIRS=pair_block, COLUMNS=columns, DEPTH=tuning.depth, num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, columns), num_experts)](
        gated_AI, experts_TK, down_EDI, out_AD, pairs, hidden, width,
        M=tuning.pairs, PAIRS=pair_block, COLUMNS=columns, DEPTH=tuning.depth, num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip
    places_TK = torch.arange(pairs, device=x_TD.device).view(tokens, top)
    return combine(out_AD, places_TK, weights_TK)


@triton.jit
def _pairs_of_tile(rank_P, hit_P, first, M: tl.constexpr, PAIRS: tl.constexpr):
    """Return the pair numbers of hits `first` to `first + M`, and which there are."""
    wanted_M = first + tl.arange(0, M)
    is_MP = (rank_P[None, :] == wanted_M[:, None]) & hit_P[None, :]
    number_P = tl.arange(0, PAIRS)
    pair_M = tl.sum(tl.where(is_MP, number_P[None, :], 0), 1)
    return pair_M, tl.sum(is_MP.to(tl.int32), 1) > 0


@triton.jit
def _gate_up_kernel(
    x_ptr, ids_ptr, weight_ptr, out_ptr, pairs, top, hidden, width,
    M: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    number_P = tl.arange(0, PAIRS)
    hit_P = tl.load(ids_ptr + number_P, mask=number_P < pairs, other=-1) == expert
    count = tl.sum(hit_P.to(tl.int32), 0)
    if count > 0:
        rank_P = tl.cumsum(hit_P.to(tl.int32), 0) - 1
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        gate_ptr = weight_ptr + expert.to(tl.int64) * 2 * width * hidden + column.to(tl.int64)[None, :] * hidden
        up_ptr = gate_ptr + width.to(tl.int64) * hidden
        depth = tl.arange(0, DEPTH)
        for first in range(0, count, M):
            pair_M, here_M = _pairs_of_tile(rank_P, hit_P, first, M, PAIRS)
            rows_ptr = x_ptr + (pair_M // top).to(tl.int64)[:, None] * hidden
            gate = tl.zeros([M, COLUMNS], dtype=tl.float32)
            up = tl.zeros([M, COLUMNS], dtype=tl.float32)
            for start in range(0, hidden, DEPTH):
                place = start + depth
                x = tl.load(rows_ptr + place[None, :], mask=here_M[:, None] & (place < hidden)[None, :], other=0.0)
                mask = (place < hidden)[:, None] & inside[None, :]
                gate = tl.dot(x, tl.load(gate_ptr + place[:, None], mask=mask, other=0.0), gate)
                up = tl.dot(x, tl.load(up_ptr + place[:, None], mask=mask, other=0.0), up)
            # As the other paths do: the product's halves are rounded before they are gated.
            gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
            up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
            gated = gate / (1 + tl.exp(-gate)) * up
            target = out_ptr + pair_M.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(target, gated.to(out_ptr.dtype.element_ty), mask=here_M[:, None] & inside[None, :])


@triton.jit
def _down_kernel(
    gated_ptr, ids_ptr, weight_ptr, out_ptr, pairs, hidden, width,
    M: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    number_P = tl.arange(0, PAIRS)
    hit_P = tl.load(ids_ptr + number_P, mask=number_P < pairs, other=-1) == expert
    count = tl.sum(hit_P.to(tl.int32), 0)
    if count > 0:
        rank_P = tl.cumsum(hit_P.to(tl.int32), 0) - 1
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < hidden
        down_ptr = weight_ptr + expert.to(tl.int64) * hidden * width + column.to(tl.int64)[None, :] * width
        depth = tl.arange(0, DEPTH)
        for first in range(0, count, M):
            pair_M, here_M = _pairs_of_tile(rank_P, hit_P, first, M, PAIRS)
            rows_ptr = gated_ptr + pair_M.to(tl.int64)[:, None] * width
            total = tl.zeros([M, COLUMNS], dtype=tl.float32)
            for start in range(0, width, DEPTH):
                place = start + depth
                x = tl.load(rows_ptr + place[None, :], mask=here_M[:, None] & (place < width)[None, :], other=0.0)
                mask = (place < width)[:, None] & inside[None, :]
                total = tl.dot(x, tl.load(down_ptr + place[:, None], mask=mask, other=0.0), total)
            target = out_ptr + pair_M.to(tl.int64)[:, None] * hidden + column[None, :]
            tl.store(target, total.to(out_ptr.dtype.element_ty), mask=here_M[:, None] & inside[None, :])
