"""A decode step of few tokens: products that stream each weight once, with what surrounds them fused in.

With a token or two a product is only as fast as its weights come from memory. Each program asks for its whole tile of a
weight at once, before it waits for the kernel in front (programmatic dependent launch): weights depend on nothing.
Norms are computed anew by every program, which costs less than a launch.

Shapes in this file: T tokens, D hidden, O rows of a weight, N heads, P nope width, R rope width, V value width,
C latent, W = C + R.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrelay.kernels.triton_rows import store_row
from kvrelay.kernels.triton_wait import let_next_begin, wait_for_previous


@triton.jit
def normed_row(x_ptr, norm_ptr, col, width, eps, NORM: tl.constexpr):
    """Return a row in fp32, RMS-normed where asked to, rounded to its dtype."""
    inside = col < width
    x = tl.load(x_ptr + col, inside, other=0.0)
    wide = x.to(tl.float32)
    if NORM:
        gain = tl.load(norm_ptr + col, inside, other=0.0).to(tl.float32)
        wide = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps) * gain).to(x.dtype).to(tl.float32)
    return wide


@triton.jit
def linear_kernel(
    x_ptr, norm_ptr, weight_ptr, add_ptr, out_ptr, cleared_ptr, x_stride, rows, width, eps,
    NORM: tl.constexpr, ADD: tl.constexpr, CLEAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = x @ weight^T; x normed before, `add` added behind, a token's number cleared, where asked to."""
    let_next_begin(PDL)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < width)[None, :]
    weight = tl.load(weight_ptr + row.to(tl.int64)[:, None] * width + col[None, :], mask, other=0.0)
    wait_for_previous(PDL)
    if CLEAR and tl.program_id(0) == 0:
        tl.store(cleared_ptr + token, 0)
    x = normed_row(x_ptr + token * x_stride, norm_ptr, col, width, eps, NORM)
    total = tl.sum(weight.to(tl.float32) * x[None, :], 1).to(out_ptr.dtype.element_ty)
    if ADD:
        before = tl.load(add_ptr + token * rows + row, row < rows, other=0.0)
        total = (before.to(tl.float32) + total.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * rows + row, total, row < rows)


@triton.jit
def absorb_kernel(
    q_ptr, latent_ptr, key_ptr, key_up_ptr, norm_ptr, cos_ptr, sin_ptr, slots_ptr,
    number_ptr, scale_ptr, rope_ptr, out_ptr, q_stride, latent_stride, key_up_stride, eps,
    N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    P_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, HALF_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, LATENT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Absorb and rotate each head's query; the programs behind the last head store the token's row."""
    let_next_begin(PDL)
    block, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if head == N:
        wait_for_previous(PDL)
        if block == 0:
            store_row(
                token, latent_ptr, key_ptr, norm_ptr, cos_ptr, sin_ptr, slots_ptr, number_ptr, scale_ptr, rope_ptr,
                latent_ptr, latent_stride, latent_stride, eps, C, R, GROUPS, GROUP_BLOCK, R_BLOCK, LATENT_STRIDE,
                SCALE_STRIDE, ROPE_STRIDE, PACKED, False,
            )  # fmt: skip
    else:
        W: tl.constexpr = C + R
        HALF: tl.constexpr = R // 2
        row_P = tl.arange(0, P_BLOCK)
        col = block * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row_P < P)[:, None] & (col < C)[None, :]
        head_up_ptr = key_up_ptr + head.to(tl.int64) * key_up_stride
        up = tl.load(head_up_ptr + row_P[:, None] * C + col[None, :], mask, other=0.0)
        wait_for_previous(PDL)
        head_ptr = q_ptr + token * q_stride + head * (P + R)
        out_row_ptr = out_ptr + (token * N + head) * W
        q = tl.load(head_ptr + row_P, row_P < P, other=0.0).to(tl.float32)
        absorbed = tl.sum(up.to(tl.float32) * q[:, None], 0)
        tl.store(out_row_ptr + col, absorbed.to(out_ptr.dtype.element_ty), col < C)
        if block == 0:
            col_F = tl.arange(0, HALF_BLOCK)
            inside_F = col_F < HALF
            low_F = tl.load(head_ptr + P + col_F, inside_F, other=0.0).to(tl.float32)
            high_F = tl.load(head_ptr + P + HALF + col_F, inside_F, other=0.0).to(tl.float32)
            cos_F = tl.load(cos_ptr + token * R + col_F, inside_F, other=0.0)
            sin_F = tl.load(sin_ptr + token * R + HALF + col_F, inside_F, other=0.0)
            turned_low_F = (low_F * cos_F - high_F * sin_F).to(out_ptr.dtype.element_ty)
            turned_high_F = (high_F * cos_F + low_F * sin_F).to(out_ptr.dtype.element_ty)
            tl.store(out_row_ptr + C + col_F, turned_low_F, inside_F)
            tl.store(out_row_ptr + C + HALF + col_F, turned_high_F, inside_F)


@triton.jit
def unabsorb_kernel(
    latent_ptr, value_up_ptr, out_ptr, value_up_stride,
    N: tl.constexpr, C: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Values [T, N * V] of attention outputs [T, N, C], fp32, that are still in latent space."""
    let_next_begin(PDL)
    block, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < V)[:, None] & (col < C)[None, :]
    up = tl.load(value_up_ptr + head.to(tl.int64) * value_up_stride + row[:, None] * C + col[None, :], mask, other=0.0)
    wait_for_previous(PDL)
    latent = tl.load(latent_ptr + (token * N + head) * C + col, col < C, other=0.0).to(out_ptr.dtype.element_ty)
    total = tl.sum(up.to(tl.float32) * latent.to(tl.float32)[None, :], 1)
    tl.store(out_ptr + (token * N + head) * V + row, total.to(out_ptr.dtype.element_ty), row < V)


@triton.jit
def head_kernel(
    x_ptr, norm_ptr, weight_ptr, logits_ptr, peaks_ptr, places_ptr, rows, width, eps, blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits in fp32, rounded as the product's dtype, and each program's largest with its place."""
    let_next_begin(PDL)
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < width)[None, :]
    weight = tl.load(weight_ptr + row.to(tl.int64)[:, None] * width + col[None, :], mask, other=0.0)
    wait_for_previous(PDL)
    x = normed_row(x_ptr + token * width, norm_ptr, col, width, eps, True)
    logit = tl.sum(weight.to(tl.float32) * x[None, :], 1).to(weight_ptr.dtype.element_ty).to(tl.float32)
    tl.store(logits_ptr + token * rows + row, logit, row < rows)
    # Not-a-number, of which no comparison holds, counts as infinite, so that it is noticed.
    logit = tl.where((logit <= 0) | (logit > 0), logit, float("inf"))
    logit = tl.where(row < rows, logit, -float("inf"))
    peak = tl.max(logit, 0)
    tl.store(peaks_ptr + token * blocks + block, peak)
    tl.store(places_ptr + token * blocks + block, tl.min(tl.where(logit == peak, row, 2147483647), 0))


@triton.jit
def best_kernel(
    peaks_ptr, places_ptr, best_ptr, chosen_ptr, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    let_next_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    at = tl.full([BLOCK], 2147483647, tl.int32)
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        peak = tl.load(peaks_ptr + token * blocks + block, block < blocks, other=-float("inf"))
        place = tl.load(places_ptr + token * blocks + block, block < blocks, other=2147483647)
        better = peak > top
        at = tl.where(better, place, at)
        top = tl.where(better, peak, top)
    best = tl.max(top, 0)
    tl.store(best_ptr + token, best)
    tl.store(chosen_ptr + token, tl.min(tl.where(top == best, at, 2147483647), 0).to(tl.int64))
