"""(token, expert) pairs in the order of their experts: a counting sort that is stable and asks nothing of the host.

Shapes in this file: T tokens, D hidden, E experts, K experts per token, A = T * K pairs, B blocks of pairs,
P pairs of a block, X = E up to the next power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CELLS = 1 << 14  # (pair, expert) cells that a program looks at


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Where pairs lie when those of one expert lie together."""

    places_TK: Tensor  # int32, the row of each pair
    tokens_A: Tensor  # int32, the token of each row
    bounds_E1: Tensor  # int32 [E + 1]: expert e has rows bounds[e] to bounds[e + 1]


def expert_order(experts_TK: Tensor, num_experts: int) -> ExpertOrder:
    """Return the order of pairs by expert, and within an expert by token; at least one token, any integer dtype."""
    num_tokens, per_token = experts_TK.shape
    num_pairs, device = num_tokens * per_token, experts_TK.device
    experts_TK = experts_TK.contiguous()
    width = triton.next_power_of_2(num_experts)
    block = max(16, _CELLS // width)
    num_blocks = triton.cdiv(num_pairs, block)
    counts_EB = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=device)
    sizes = {"E": num_experts, "X": width, "P": block}
    _count_kernel[(num_blocks,)](experts_TK, counts_EB, num_pairs, num_blocks, **sizes)
    ends_EB = counts_EB.flatten().cumsum(0, dtype=torch.int32)
    places_TK = torch.empty(num_tokens, per_token, dtype=torch.int32, device=device)
    tokens_A = torch.empty(num_pairs, dtype=torch.int32, device=device)
    bounds_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    _place_kernel[(num_blocks,)](
        experts_TK, ends_EB, places_TK, tokens_A, bounds_E1, num_pairs, num_blocks, K=per_token, **sizes
    )
    return ExpertOrder(places_TK, tokens_A, bounds_E1)


def spread(x_TD: Tensor, order: ExpertOrder) -> Tensor:
    """Return x_AD, the rows of all pairs in order; each token is read once."""
    (num_tokens, width), per_token = x_TD.shape, order.places_TK.shape[1]
    x_AD = x_TD.new_empty(num_tokens * per_token, width)
    block = min(2048, triton.next_power_of_2(width))
    _spread_kernel[(num_tokens, triton.cdiv(width, block))](
        x_TD.contiguous(), order.places_TK, x_AD, width, K=per_token, BLOCK=block
    )
    return x_AD


@triton.jit
def _hits(experts_ptr, num_pairs, X: tl.constexpr, P: tl.constexpr):
    """Return the pairs of this program's block, and of which experts they are."""
    pair_P = tl.program_id(0) * P + tl.arange(0, P)
    expert_P = tl.load(experts_ptr + pair_P, pair_P < num_pairs, other=-1)
    return pair_P, (expert_P[:, None] == tl.arange(0, X)[None, :]).to(tl.int32)


@triton.jit
def _count_kernel(
    experts_ptr, counts_ptr, num_pairs, num_blocks, E: tl.constexpr, X: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    _, hit_PX = _hits(experts_ptr, num_pairs, X, P)
    expert_X = tl.arange(0, X)
    tl.store(counts_ptr + expert_X * num_blocks + tl.program_id(0), tl.sum(hit_PX, 0), expert_X < E)


@triton.jit
def _place_kernel(
    experts_ptr, ends_ptr, places_ptr, tokens_ptr, bounds_ptr, num_pairs, num_blocks,
    K: tl.constexpr, E: tl.constexpr, X: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    pair_P, hit_PX = _hits(experts_ptr, num_pairs, X, P)
    expert_X = tl.arange(0, X)
    here_X = expert_X < E
    end_X = tl.load(ends_ptr + expert_X * num_blocks + tl.program_id(0), here_X, other=0)
    # The last pair of this block and an expert lies just before the end; those before it in front of it.
    place_PX = end_X[None, :] - tl.sum(hit_PX, 0)[None, :] + tl.cumsum(hit_PX, 0) - 1
    place_P = tl.sum(hit_PX * place_PX, 1)
    tl.store(places_ptr + pair_P, place_P, pair_P < num_pairs)
    tl.store(tokens_ptr + place_P, pair_P // K, pair_P < num_pairs)
    if tl.program_id(0) == 0:
        last_X = tl.load(ends_ptr + expert_X * num_blocks + num_blocks - 1, here_X, other=0)
        tl.store(bounds_ptr + 1 + expert_X, last_X, here_X)
        tl.store(bounds_ptr + expert_X, 0, expert_X == 0)


@triton.jit
def _spread_kernel(x_ptr, places_ptr, out_ptr, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * width + column, column < width, other=0.0)
    for index in tl.static_range(K):
        place = tl.load(places_ptr + token * K + index).to(tl.int64)
        tl.store(out_ptr + place * width + column, x, column < width)
