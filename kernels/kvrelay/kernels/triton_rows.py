"""What a new token's projections become before attention, in one launch each: cache rows and rotated queries.

Shapes in this file: T tokens, N heads, C latent, R rope, W = C + R, G groups of C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.core.layout import fp8_groups
from kvrelay.kernels import quant
from kvrelay.kernels.rope import RopeTables


def write_rows(
    latent_TC: Tensor,
    key_TR: Tensor,
    *,
    norm_C: Tensor,
    eps: float,
    tables: RopeTables,
    slots_T: Tensor,
    pool: Tensor,
    rows_TW: Tensor | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Normalise latents, rotate rope keys and store both as rows of the pool, quantised where the pool is; capturable.

    Args:
        latent_TC, key_TR: projections, last axis dense, any row stride.
        slots_T: int64; a token whose slot is negative is not stored.
        pool: one layer [slots, W], contiguous; or uint8 rows of `quant`.
        rows_TW: when given, contiguous, receives the rows of all tokens too, unquantised.
        turn: queries [T, N, R] and where they go rotated, in the same launch; both may have any strides but a dense
            last axis, and may be the same.
    """
    num_tokens, latent_width = latent_TC.shape
    rope_width = key_TR.shape[1]
    packed = pool.dtype == torch.uint8
    groups = fp8_groups(latent_width) if packed else 1
    views = [pool.view(dtype) for dtype in (quant.NUMBER, torch.float32, torch.bfloat16)] if packed else [pool] * 3
    assert latent_TC.stride(1) == key_TR.stride(1) == 1, "rows of the projections are dense"
    if num_tokens == 0:
        return
    x_TNR, out_TNR = turn or (key_TR[:, None], key_TR[:, None])
    assert x_TNR.stride(2) == out_TNR.stride(2) == 1, "the last axis is dense"
    num_heads = x_TNR.shape[1]
    _write_rows[(num_tokens, 1 if turn is None else 2)](
        x_TNR,
        out_TNR,
        *x_TNR.stride()[:2],
        *out_TNR.stride()[:2],
        latent_TC,
        key_TR,
        norm_C,
        tables.cos_TR,
        tables.sin_TR,
        slots_T,
        *views,
        latent_TC if rows_TW is None else rows_TW,
        latent_TC.stride(0),
        key_TR.stride(0),
        eps,
        C=latent_width,
        R=rope_width,
        GROUPS=groups,
        GROUP_BLOCK=triton.next_power_of_2(triton.cdiv(latent_width, groups)),
        R_BLOCK=triton.next_power_of_2(rope_width),
        LATENT_STRIDE=views[0].shape[-1],
        SCALE_STRIDE=views[1].shape[-1],
        ROPE_STRIDE=views[2].shape[-1],
        PACKED=packed,
        COPY=rows_TW is not None,
        N=num_heads,
        N_BLOCK=triton.next_power_of_2(num_heads),
        HALF_BLOCK=triton.next_power_of_2(rope_width // 2),
        num_warps=1 if latent_width <= 128 else 4,
    )


@triton.jit
def store_row(
    token,
    latent_ptr,
    key_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    number_ptr,
    scale_ptr,
    rope_ptr,
    rows_ptr,
    latent_stride,
    key_stride,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    R_BLOCK: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
    COPY: tl.constexpr,
):
    """Make and store the row of one token; see `write_rows`."""
    W: tl.constexpr = C + R
    X: tl.constexpr = C // GROUPS
    slot = tl.load(slots_ptr + token)
    group_G = tl.arange(0, GROUPS)
    cell_X = tl.arange(0, GROUP_BLOCK)
    col_GX = group_G[:, None] * X + cell_X[None, :]
    inside_GX = tl.broadcast_to((cell_X < X)[None, :], (GROUPS, GROUP_BLOCK))
    latent_GX = tl.load(latent_ptr + token * latent_stride + col_GX, inside_GX, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(latent_GX * latent_GX, 1), 0) / C
    normed_GX = latent_GX * tl.rsqrt(mean + eps) * tl.load(norm_ptr + col_GX, inside_GX, other=0.0).to(tl.float32)
    row_GX = normed_GX.to(latent_ptr.dtype.element_ty)
    # The partner of j is j + R/2 around the end; the table of sines carries the sign.
    col_R = tl.arange(0, R_BLOCK)
    inside_R = col_R < R
    key_R = tl.load(key_ptr + token * key_stride + col_R, inside_R, other=0.0).to(tl.float32)
    partner_R = tl.load(key_ptr + token * key_stride + (col_R + R // 2) % R, inside_R, other=0.0).to(tl.float32)
    cos_R = tl.load(cos_ptr + token * R + col_R, inside_R, other=0.0)
    sin_R = tl.load(sin_ptr + token * R + col_R, inside_R, other=0.0)
    turned_R = (key_R * cos_R + partner_R * sin_R).to(latent_ptr.dtype.element_ty)
    if COPY:
        tl.store(rows_ptr + token * W + col_GX, row_GX, inside_GX)
        tl.store(rows_ptr + token * W + C + col_R, turned_R, inside_R)
    if slot >= 0:
        if PACKED:
            value_GX = row_GX.to(tl.float32)
            largest_G = tl.maximum(tl.max(tl.abs(value_GX), 1), 1e-30)
            scale_G = tl.exp2(tl.ceil(tl.log2(largest_G / 448.0)))
            number_GX = tl.clamp(value_GX / scale_G[:, None], -448.0, 448.0).to(number_ptr.dtype.element_ty)
            tl.store(number_ptr + slot * LATENT_STRIDE + col_GX, number_GX, inside_GX)
            tl.store(scale_ptr + slot * SCALE_STRIDE + C // 4 + group_G, scale_G)
        else:
            tl.store(number_ptr + slot * LATENT_STRIDE + col_GX, row_GX.to(number_ptr.dtype.element_ty), inside_GX)
        stored_R = turned_R.to(rope_ptr.dtype.element_ty)
        tl.store(rope_ptr + slot * ROPE_STRIDE + ROPE_STRIDE - R + col_R, stored_R, inside_R)


@triton.jit
def _write_rows(
    x_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    out_token_stride,
    out_head_stride,
    latent_ptr,
    key_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    number_ptr,
    scale_ptr,
    rope_ptr,
    rows_ptr,
    latent_stride,
    key_stride,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    R_BLOCK: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
    COPY: tl.constexpr,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        store_row(
            token,
            latent_ptr,
            key_ptr,
            norm_ptr,
            cos_ptr,
            sin_ptr,
            slots_ptr,
            number_ptr,
            scale_ptr,
            rope_ptr,
            rows_ptr,
            latent_stride,
            key_stride,
            eps,
            C,
            R,
            GROUPS,
            GROUP_BLOCK,
            R_BLOCK,
            LATENT_STRIDE,
            SCALE_STRIDE,
            ROPE_STRIDE,
            PACKED,
            COPY,
        )
    else:
        _turn_heads(
            token,
            x_ptr,
            out_ptr,
            cos_ptr,
            sin_ptr,
            x_token_stride,
            x_head_stride,
            out_token_stride,
            out_head_stride,
            N,
            R,
            N_BLOCK,
            HALF_BLOCK,
        )


@triton.jit
def _turn_heads(
    token,
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    x_token_stride,
    x_head_stride,
    out_token_stride,
    out_head_stride,
    N: tl.constexpr,
    R: tl.constexpr,
    N_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Rotate all heads of one token."""
    HALF: tl.constexpr = R // 2
    head_N = tl.arange(0, N_BLOCK)
    col_F = tl.arange(0, HALF_BLOCK)
    inside_NF = (head_N < N)[:, None] & (col_F < HALF)[None, :]
    x_NF = x_ptr + token * x_token_stride + head_N[:, None] * x_head_stride + col_F[None, :]
    low_NF = tl.load(x_NF, inside_NF, other=0.0).to(tl.float32)
    high_NF = tl.load(x_NF + HALF, inside_NF, other=0.0).to(tl.float32)
    cos_F = tl.load(cos_ptr + token * R + col_F, col_F < HALF, other=0.0)[None, :]
    sin_F = tl.load(sin_ptr + token * R + HALF + col_F, col_F < HALF, other=0.0)[None, :]
    out_NF = out_ptr + token * out_token_stride + head_N[:, None] * out_head_stride + col_F[None, :]
    tl.store(out_NF, (low_NF * cos_F - high_NF * sin_F).to(out_ptr.dtype.element_ty), inside_NF)
    tl.store(out_NF + HALF, (high_NF * cos_F + low_NF * sin_F).to(out_ptr.dtype.element_ty), inside_NF)
