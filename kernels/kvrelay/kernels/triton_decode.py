"""Split flash decoding over paged latents: each row is read once, as key and as value.

The line of all sequences' tiles is cut into equal parts, one program each. A sequence inside one part is written out at
once; pieces of a sequence cut across parts go to a buffer and a second kernel joins them. Piece (part p, sequence b)
has number p + b: along the line either grows at every cut, so numbers never repeat.

Shapes in this file: B sequences, J pieces, H a block of heads, T rows of a tile, C latent, R rope, W = C + R, N heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.core.layout import fp8_groups
from kvrelay.kernels import quant, triton_join
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.triton_support import num_processors, shared_bytes
from kvrelay.kernels.triton_wait import fetch, let_next_begin, wait_for_previous
from kvrelay.kernels.triton_widen import widen

PAIRS_BYTES = 164 * 1024  # of shared memory, for three steps of two tiles


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is compiled and spread, by measurement."""

    heads: int  # of one program
    programs_per_processor: int
    num_warps: int
    num_stages: int
    tiles: int = 1  # that are read and multiplied at once


def tuning_for(num_heads: int, dtype: torch.dtype, *, alone: bool = False) -> Tuning:
    """
    Args:
        alone: one sequence has all parts, so that none begins in the middle of two tiles.
    """
    if dtype == torch.float32:  # for checking, not for speed
        return Tuning(heads=16, programs_per_processor=1, num_warps=8, num_stages=1)
    if alone and num_heads <= 16 and dtype == torch.bfloat16:
        # H200, a step of DeepSeek-V2-Lite's shape at 8K / 32K / 128K: 1.89 / 2.11 / 2.88 ms, tile by tile as below
        # 1.92 / 2.17 / 2.90.
        return Tuning(heads=16, programs_per_processor=1, num_warps=8, num_stages=3, tiles=2)
    if num_heads <= 16:
        # H200, 64 sequences of 32K: 594 us; one program per processor with four stages 735, three with two 646, tiles
        # of 64 rows 622 to 652, keys times queries (so that the matrix unit's 64 rows are tokens) 761.
        return Tuning(heads=16, programs_per_processor=2, num_warps=4, num_stages=3)
    return Tuning(heads=64, programs_per_processor=1, num_warps=8, num_stages=3)


def decode(q_BNW: Tensor, pool_PSW: Tensor, plan: PagedPlan, *, scale: float, latent_width: int) -> Tensor:
    """Contract of `mla_decode.mla_decode`; sequences of length 0 give 0."""
    num_sequences, num_heads, row_width = q_BNW.shape
    assert num_sequences == plan.num_sequences, "one query per sequence of the plan"
    assert pool_PSW.is_contiguous(), "a layer of the pool is contiguous"
    pairs = plan.page_tokens % (2 * plan.tile_tokens) == 0 and shared_bytes(q_BNW.device) >= PAIRS_BYTES
    tuning = tuning_for(num_heads, pool_PSW.dtype, alone=num_sequences == 1 and pairs)
    head_blocks = triton.cdiv(num_heads, tuning.heads)
    parts = max(1, num_processors(q_BNW.device) * tuning.programs_per_processor // head_blocks)
    rows = _rows(pool_PSW, latent_width)
    dtype, q_BNW = q_BNW.dtype, q_BNW.to(rows.rope.dtype).contiguous()
    out_BNC = q_BNW.new_empty(num_sequences, num_heads, latent_width, dtype=dtype)
    pieces_JNC = q_BNW.new_empty(parts + num_sequences, num_heads, latent_width, dtype=torch.float32)
    lse_JN = q_BNW.new_empty(parts + num_sequences, num_heads, dtype=torch.float32)
    rope_width = row_width - latent_width
    early = triton_join.joins_early(out_BNC)
    _decode[(head_blocks, parts)](
        q_BNW,
        rows.latent,
        rows.scales,
        rows.rope,
        plan.page_table_BP,
        plan.lengths_B,
        plan.starts_B1,
        out_BNC,
        pieces_JNC,
        lse_JN,
        num_sequences,
        plan.page_table_BP.stride(0),
        scale * math.log2(math.e),
        N=num_heads,
        C=latent_width,
        R=rope_width,
        C_BLOCK=triton.next_power_of_2(latent_width),
        R_BLOCK=max(16, triton.next_power_of_2(rope_width)),
        B_BLOCK=triton.next_power_of_2(num_sequences),
        H=tuning.heads,
        TILE=plan.tile_tokens,
        TILES=tuning.tiles,
        PAGE=plan.page_tokens,
        GROUPS=rows.groups,
        LATENT_STRIDE=rows.latent.shape[-1],
        SCALE_STRIDE=rows.scales.shape[-1],
        ROPE_STRIDE=rows.rope.shape[-1],
        ROPE_AT=rows.rope.shape[-1] - rope_width,
        WIDEN=q_BNW.device.type == "cpu",
        MIN_TILES=triton_join.MIN_PART_TILES,
        PDL=early,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=early,
    )
    triton_join.join(out_BNC, pieces_JNC, lse_JN, plan, parts=parts, early=early, tiles=tuning.tiles)
    return out_BNC


@dataclass(frozen=True, slots=True)
class Rows:
    """A layer of the pool by the types that are in it."""

    latent: Tensor
    scales: Tensor
    rope: Tensor
    groups: int  # per row with a scale of its own; 0 = not quantised


def _rows(pool_PSW: Tensor, latent_width: int) -> Rows:
    if pool_PSW.dtype != torch.uint8:
        return Rows(pool_PSW, pool_PSW, pool_PSW, 0)
    return Rows(
        pool_PSW.view(quant.NUMBER),
        pool_PSW.view(torch.float32),
        pool_PSW.view(torch.bfloat16),
        fp8_groups(latent_width),
    )


@triton.jit
def _decode(
    q_ptr,
    latent_ptr,
    scales_ptr,
    rope_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    pieces_ptr,
    lse_ptr,
    num_sequences,
    table_stride,
    scale_log2,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    C_BLOCK: tl.constexpr,
    R_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # that are read at once: T rows
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,  # 0 = not quantised
    LATENT_STRIDE: tl.constexpr,  # numbers per row
    SCALE_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    ROPE_AT: tl.constexpr,
    WIDEN: tl.constexpr,  # the interpreter multiplies through numpy, which knows no bf16
    MIN_TILES: tl.constexpr,  # of a part
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    W: tl.constexpr = C + R
    T: tl.constexpr = TILE * TILES
    part = tl.program_id(1)
    head_H = tl.program_id(0) * H + tl.arange(0, H)
    col_C = tl.arange(0, C_BLOCK)
    col_R = tl.arange(0, R_BLOCK)
    row_T = tl.arange(0, T)
    if GROUPS:
        group_G = tl.arange(0, GROUPS)
        cell_X = tl.arange(0, C_BLOCK // GROUPS)
        col_TG = row_T[:, None] * SCALE_STRIDE + C // 4 + group_G[None, :]
        col_TGX = (row_T[:, None] * LATENT_STRIDE + group_G[None, :] * (C // GROUPS))[:, :, None] + cell_X[
            None, None, :
        ]
    total = tl.load(starts_ptr + num_sequences)
    per_part = tl.cdiv(tl.maximum(tl.cdiv(total, tl.num_programs(1)), MIN_TILES), TILES) * TILES
    tile = part * per_part
    end = tl.minimum(tile + per_part, total)
    # The sequence a part begins in: as many sequences as end at or before its first tile come before it.
    seq_B = tl.arange(0, B_BLOCK)
    ends_B = tl.load(starts_ptr + 1 + seq_B, seq_B < num_sequences, other=2147483647)
    seq = tl.sum((ends_B <= tile).to(tl.int32))
    # The plan was ready before the first kernel of this chain; all rows but the newest are older still.
    seq_start = tl.load(starts_ptr + seq)
    seq_end = tl.load(starts_ptr + seq + 1, tile < end, other=0)
    length = tl.load(lengths_ptr + seq, tile < end, other=0)
    page = tl.load(table_ptr + seq.to(tl.int64) * table_stride + (tile - seq_start) * TILE // PAGE, tile < end, other=0)
    if PDL and tile < end:
        row_bytes: tl.constexpr = LATENT_STRIDE * latent_ptr.dtype.element_ty.primitive_bitwidth // 8
        if T * row_bytes % 16 == 0:
            fetch(latent_ptr, (page.to(tl.int64) * PAGE + (tile - seq_start) * TILE % PAGE) * row_bytes, T * row_bytes)
    wait_for_previous(PDL)
    while tile < end:
        stop = tl.minimum(end, seq_end)
        q_row_H1 = ((seq * N + head_H) * W)[:, None]
        q_HC = tl.load(q_ptr + q_row_H1 + col_C[None, :], (head_H < N)[:, None] & (col_C < C)[None, :], other=0.0)
        q_HR = tl.load(q_ptr + q_row_H1 + C + col_R[None, :], (head_H < N)[:, None] & (col_R < R)[None, :], other=0.0)
        if WIDEN:
            q_HC = q_HC.to(tl.float32)
            q_HR = q_HR.to(tl.float32)
        top_H = tl.full([H], -float("inf"), tl.float32)
        sum_H = tl.zeros([H], tl.float32)
        acc_HC = tl.zeros([H, C_BLOCK], tl.float32)
        pages_ptr = table_ptr + seq.to(tl.int64) * table_stride
        end_row = (stop - seq_start) * TILE
        for first_row in tl.range((tile - seq_start) * TILE, end_row, T):
            top_row = page.to(tl.int64) * PAGE + first_row % PAGE
            # One turn ahead, or the compiler would split its pipeline between this load and those of the rows.
            page = tl.load(pages_ptr + (first_row + T) // PAGE, first_row + T < end_row, other=0)
            seen_T = first_row + row_T < length
            # Rows behind the end may hold anything, so they are never read: a weight of 0 lets not-a-number through.
            if GROUPS:
                kv_TGX = tl.load(
                    latent_ptr + top_row * LATENT_STRIDE + col_TGX,
                    seen_T[:, None, None] & (cell_X < C // GROUPS)[None, None, :],
                    other=0.0,
                )
                scale_TG = tl.load(scales_ptr + top_row * SCALE_STRIDE + col_TG, seen_T[:, None], other=0.0)
                if WIDEN:
                    kv_TC = tl.reshape(kv_TGX.to(tl.float32) * scale_TG[:, :, None], (T, C_BLOCK))
                else:
                    kv_TC = tl.reshape(widen(kv_TGX, scale_TG), (T, C_BLOCK))
            else:
                kv_TC = tl.load(
                    latent_ptr + top_row * LATENT_STRIDE + row_T[:, None] * LATENT_STRIDE + col_C[None, :],
                    seen_T[:, None] & (col_C < C)[None, :],
                    other=0.0,
                )
            k_TR = tl.load(
                rope_ptr + top_row * ROPE_STRIDE + ROPE_AT + row_T[:, None] * ROPE_STRIDE + col_R[None, :],
                seen_T[:, None] & (col_R < R)[None, :],
                other=0.0,
            )
            if WIDEN:
                kv_TC = kv_TC.to(tl.float32)
                k_TR = k_TR.to(tl.float32)
            score_HT = tl.dot(q_HC, tl.trans(kv_TC), input_precision="ieee")
            score_HT = tl.dot(q_HR, tl.trans(k_TR), score_HT, input_precision="ieee") * scale_log2
            score_HT = tl.where(seen_T[None, :], score_HT, -float("inf"))
            new_top_H = tl.maximum(top_H, tl.max(score_HT, 1))
            shrink_H = tl.exp2(top_H - new_top_H)
            weight_HT = tl.exp2(score_HT - new_top_H[:, None])
            sum_H = sum_H * shrink_H + tl.sum(weight_HT, 1)
            acc_HC = tl.dot(weight_HT.to(kv_TC.dtype), kv_TC, acc_HC * shrink_H[:, None], input_precision="ieee")
            top_H = new_top_H
        if stop > tile:
            out_HC = acc_HC / sum_H[:, None]
            mask_HC = (head_H < N)[:, None] & (col_C < C)[None, :]
            if (tile == seq_start) & (stop == seq_end):
                tl.store(out_ptr + ((seq * N + head_H) * C)[:, None] + col_C[None, :], out_HC, mask_HC)
            else:
                piece_H = (part + seq) * N + head_H
                tl.store(pieces_ptr + (piece_H * C)[:, None] + col_C[None, :], out_HC, mask_HC)
                tl.store(lse_ptr + piece_H, top_H + tl.log2(sum_H), head_H < N)
        tile = stop
        seq += 1
        seq_start = seq_end
        seq_end = tl.load(starts_ptr + seq + 1, tile < end, other=0)
        length = tl.load(lengths_ptr + seq, tile < end, other=0)
        page = tl.load(table_ptr + seq.to(tl.int64) * table_stride, tile < end, other=0)
