"""Scores of experts on matrix units, exact to what fp32 holds.

Shapes in this file: T tokens, D hidden, E experts, P parts of the weight, X experts and S numbers of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _EXPERTS, _DEPTH = 128, 64, 64


def logits_of_parts(x_TD: Tensor, parts_PED: Tensor) -> Tensor:
    """Return x @ sum of the parts [T, E] in fp32; both are bf16, the first part is the largest."""
    (tokens, width), (num_parts, experts, _) = x_TD.shape, parts_PED.shape
    assert x_TD.is_contiguous(), "tokens are neighbours"
    assert parts_PED.is_contiguous(), "rows of the parts are neighbours"
    logits_TE = torch.empty(tokens, experts, dtype=torch.float32, device=x_TD.device)
    _logits_kernel[(triton.cdiv(tokens, _TOKENS), triton.cdiv(experts, _EXPERTS))](
        x_TD, parts_PED, logits_TE, tokens, width, experts, P=num_parts,
        TOKENS=_TOKENS, EXPERTS=_EXPERTS, DEPTH=_DEPTH, num_warps=4, num_stages=4,
    )  # fmt: skip
    return logits_TE


@triton.jit
def _logits_kernel(
    x_ptr, parts_ptr, logits_ptr, tokens, width, experts,
    P: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    token_T = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert_X = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    here_T, here_X = token_T < tokens, expert_X < experts
    minus_TX = tl.zeros([TOKENS, EXPERTS], dtype=tl.float32)
    small_TX = tl.zeros([TOKENS, EXPERTS], dtype=tl.float32)
    for start in range(0, width, DEPTH):
        place_S = start + tl.arange(0, DEPTH)
        inside_S = place_S < width
        x_TS = tl.load(
            x_ptr + token_T[:, None] * width + place_S[None, :], here_T[:, None] & inside_S[None, :], other=0.0
        )
        weight_ptr = parts_ptr + expert_X[None, :] * width + place_S[:, None]
        mask_SX = inside_S[:, None] & here_X[None, :]
        # Matrix units cut off what they add up, to the same side every time: each block of the large part starts anew,
        # and is subtracted, since a compiler would let an addition continue the sum of the one before.
        minus_TX -= tl.dot(x_TS, tl.load(weight_ptr, mask_SX, other=0.0))
        for part in tl.static_range(1, P):
            weight_SX = tl.load(weight_ptr + part * experts * width, mask_SX, other=0.0)
            small_TX = tl.dot(x_TS, weight_SX, small_TX)
    mask_TX = here_T[:, None] & here_X[None, :]
    tl.store(logits_ptr + token_T[:, None] * experts + expert_X[None, :], small_TX - minus_TX, mask_TX)
