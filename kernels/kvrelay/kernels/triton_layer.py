"""Triton kernels that read a row, do a little arithmetic and write it once. NVIDIA GPUs only.

Shapes in this file: T tokens, D hidden, N heads, V value width, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MERGE_ROWS = 8  # (token, head) rows per program
_ROUTER_EXPERTS = 1  # experts per program: enough programs to pull the weight from memory at batch 1


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, normed_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(normed_ptr + row * width + columns, (wide * scale * weight).to(x.dtype), mask=inside)


def rms_norm(hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Contract of `residual_norm.rms_norm`."""
    hidden_TD = hidden_TD.contiguous()
    tokens, width = hidden_TD.shape
    normed_TD = torch.empty_like(hidden_TD)
    block = triton.next_power_of_2(width)
    if tokens:
        _rms_norm_kernel[(tokens,)](
            hidden_TD, weight_D, normed_TD, width, eps, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return normed_TD


@triton.jit
def _add_rms_norm_kernel(x_ptr, delta_ptr, weight_ptr, sum_ptr, normed_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + row * width + columns, mask=inside, other=0.0)
    total = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * width + columns, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * width + columns, (wide * scale * weight).to(x.dtype), mask=inside)


def add_rms_norm(hidden_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contract of `residual_norm.add_rms_norm`."""
    hidden_TD, delta_TD = hidden_TD.contiguous(), delta_TD.contiguous()
    tokens, width = hidden_TD.shape
    sum_TD, normed_TD = torch.empty_like(hidden_TD), torch.empty_like(hidden_TD)
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(tokens,)](
        hidden_TD, delta_TD, weight_D, sum_TD, normed_TD, width, eps,
        BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return sum_TD, normed_TD


@triton.jit
def _merge_kernel(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, out_ptr, lse_ptr, rows, heads, width,
    a_t, a_n, al_t, al_n, b_t, b_n, bl_t, bl_n, o_t, o_n, ol_t, ol_n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token, head = row // heads, row % heads
    columns = tl.arange(0, WIDTH)
    mask = inside[:, None] & (columns < width)[None, :]
    a_lse = tl.load(a_lse_ptr + token * al_t + head * al_n, mask=inside, other=0.0).to(tl.float32)
    b_lse = tl.load(b_lse_ptr + token * bl_t + head * bl_n, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(a_lse, b_lse)
    top = tl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be nan
    weight_a, weight_b = tl.exp(a_lse - top), tl.exp(b_lse - top)
    total = weight_a + weight_b
    nothing = total == 0.0
    share = 1.0 / tl.where(nothing, 1.0, total)
    a = tl.load(a_ptr + (token * a_t + head * a_n)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + (token * b_t + head * b_n)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    merged = a * (weight_a * share)[:, None] + b * (weight_b * share)[:, None]
    tl.store(out_ptr + (token * o_t + head * o_n)[:, None] + columns[None, :], merged, mask=mask)
    tl.store(lse_ptr + token * ol_t + head * ol_n, tl.where(nothing, -float("inf"), top + tl.log(total)), mask=inside)


def merge_into(
    a_TNV: Tensor, a_lse_TN: Tensor, b_TNV: Tensor, b_lse_TN: Tensor, out_TNV: Tensor, lse_TN: Tensor
) -> None:
    """Write the merge of two partials; contract of `merge.merge_partials`, any float dtypes.

    The result may be one of the inputs: every row is read before it is written, by the program that writes it.
    """
    tokens, heads, width = a_TNV.shape
    if not tokens:
        return
    for tensor in (a_TNV, b_TNV, out_TNV):
        assert tensor.stride(2) == 1, "the values of a row are neighbours"
    tensors = (a_TNV, a_lse_TN, b_TNV, b_lse_TN, out_TNV, lse_TN)
    strides = [tensor.stride(axis) for tensor in tensors for axis in (0, 1)]
    rows = tokens * heads
    _merge_kernel[(triton.cdiv(rows, _MERGE_ROWS),)](
        a_TNV, a_lse_TN, b_TNV, b_lse_TN, out_TNV, lse_TN, rows, heads, width, *strides,
        ROWS=_MERGE_ROWS, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


@triton.jit
def _router_logits_kernel(x_ptr, weight_ptr, logits_ptr, width, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    mask = (expert < experts)[:, None] & inside[None, :]
    weight = tl.load(weight_ptr + expert[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.store(logits_ptr + token * experts + expert, tl.sum(weight * x[None, :], 1), mask=expert < experts)


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x @ weight^T [T, E] in fp32, for few tokens; `weight_ED` is fp32, both contiguous."""
    (tokens, width), experts = x_TD.shape, weight_ED.shape[0]
    logits_TE = torch.empty(tokens, experts, dtype=torch.float32, device=x_TD.device)
    _router_logits_kernel[(tokens, triton.cdiv(experts, _ROUTER_EXPERTS))](
        x_TD, weight_ED, logits_TE, width, experts,
        EXPERTS=_ROUTER_EXPERTS, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return logits_TE


@triton.jit
def _softmax_top_kernel(
    logits_ptr, weights_ptr, ids_ptr, tokens, experts, scale,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr, ALWAYS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    logits = tl.load(logits_ptr + token[:, None] * experts + expert[None, :], mask=mask, other=-float("inf"))
    peak = tl.max(logits, 1)
    peak = tl.where(token < tokens, peak, 0.0)
    scores = tl.exp(logits - peak[:, None])
    scores = scores / tl.where(token < tokens, tl.sum(scores, 1), 1.0)[:, None]
    left = tl.where(mask, scores, -1.0)
    chosen = tl.zeros([TOKENS], dtype=tl.float32)
    for _ in tl.static_range(TOP):
        best, at = tl.max(left, 1, return_indices=True)
        chosen += best
        left = tl.where(expert[None, :] == at[:, None], -1.0, left)
    left = tl.where(mask, scores, -1.0)
    factor = scale / (chosen + 1e-20) if NORMALISE else scale + chosen * 0.0
    for place in tl.static_range(TOP):
        best, at = tl.max(left, 1, return_indices=True)
        tl.store(weights_ptr + token * (TOP + ALWAYS) + place, best * factor, mask=token < tokens)
        tl.store(ids_ptr + token * (TOP + ALWAYS) + place, at.to(tl.int64), mask=token < tokens)
        left = tl.where(expert[None, :] == at[:, None], -1.0, left)
    for extra in tl.static_range(ALWAYS):
        where = token * (TOP + ALWAYS) + TOP + extra
        tl.store(weights_ptr + where, factor * 0.0 + 1.0, mask=token < tokens)
        tl.store(ids_ptr + where, token * 0 + experts + extra, mask=token < tokens)


def softmax_top(
    logits_TE: Tensor, *, top: int, scale: float, normalise: bool, always: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (weights_TK fp32, experts_TK int64) of the `top` largest softmax scores, times `scale`, best first.

    Behind them come the `always` experts numbered from E on, with weight 1.
    """
    tokens, experts = logits_TE.shape
    weights_TK = torch.empty(tokens, top + always, dtype=torch.float32, device=logits_TE.device)
    ids_TK = torch.empty(tokens, top + always, dtype=torch.int64, device=logits_TE.device)
    block = 1 if tokens <= 256 else 8
    _softmax_top_kernel[(triton.cdiv(tokens, block),)](
        logits_TE, weights_TK, ids_TK, tokens, experts, scale,
        TOKENS=block, EXPERTS=triton.next_power_of_2(experts), TOP=top, ALWAYS=always,
        NORMALISE=normalise,
        num_warps=1 if block == 1 else 4,
    )  # fmt: skip
    return weights_TK, ids_TK


@triton.jit
def _rope_tables_kernel(positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, half, scale, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    angles = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + columns, inside, other=0.0)
    cos, sin = tl.cos(angles) * scale, tl.sin(angles) * scale
    place = token * 2 * half + columns
    tl.store(cos_ptr + place, cos, inside)
    tl.store(cos_ptr + place + half, cos, inside)
    tl.store(sin_ptr + place, -sin, inside)
    tl.store(sin_ptr + place + half, sin, inside)


def rope_tables(positions_T: Tensor, frequencies_F: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of `rope.RopeTables`, times `scale`, in one launch."""
    tokens, half = len(positions_T), len(frequencies_F)
    cos_TR, sin_TR = (torch.empty(tokens, 2 * half, device=positions_T.device) for _ in range(2))
    if tokens:
        _rope_tables_kernel[(tokens,)](
            positions_T, frequencies_F, cos_TR, sin_TR, half, scale, BLOCK=triton.next_power_of_2(half), num_warps=1
        )
    return cos_TR, sin_TR


@triton.jit
def _gate_kernel(wide_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(wide_ptr + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(wide_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * width + columns, wide / (1 + tl.exp(-wide)) * up.to(tl.float32), mask=inside)


def gated(wide_A2I: Tensor) -> Tensor:
    """Return silu(first half) * second half of each row; `wide_A2I` is contiguous."""
    rows, width = wide_A2I.shape[0], wide_A2I.shape[1] // 2
    out_AI = wide_A2I.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    if rows:
        _gate_kernel[(rows, triton.cdiv(width, block))](wide_A2I, out_AI, width, BLOCK=block, num_warps=4)
    return out_AI


@triton.jit
def _combine_kernel(
    rows_ptr, places_ptr, weights_ptr, more_ptr, add_ptr, out_ptr, width,
    TOP: tl.constexpr, IN_ORDER: tl.constexpr, MORE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for index in tl.static_range(TOP):
        place = token * TOP + index
        if not IN_ORDER:
            place = tl.load(places_ptr + place).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP + index)
        total += weight * tl.load(rows_ptr + place * width + columns, mask=inside, other=0.0).to(tl.float32)
    if MORE:
        total += tl.load(more_ptr + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(add_ptr + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total, mask=inside)


def combine(
    rows_AD: Tensor,
    places_TK: Tensor | None,
    weights_TK: Tensor,
    *,
    more_TD: Tensor | None = None,
    into_TD: Tensor | None = None,
) -> Tensor:
    """Return per token the sum, in fp32 inside, of its K rows times their weights.

    Args:
        places_TK: rows, any integers; None: the rows stand in order.
        more_TD: contiguous, a row per token that is added as it is.
        into_TD: contiguous, receives the sum on top of what it holds, and is returned.
    """
    tokens, top = weights_TK.shape
    width = rows_AD.shape[1]
    out_TD = rows_AD.new_empty(tokens, width) if into_TD is None else into_TD
    assert out_TD.is_contiguous(), "rows of the output are neighbours"
    block = min(1024, triton.next_power_of_2(width))
    if tokens:
        _combine_kernel[(tokens, triton.cdiv(width, block))](
            rows_AD, weights_TK if places_TK is None else places_TK, weights_TK,
            rows_AD if more_TD is None else more_TD, out_TD, out_TD, width,
            TOP=top, IN_ORDER=places_TK is None, MORE=more_TD is not None, ADD=into_TD is not None,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out_TD
