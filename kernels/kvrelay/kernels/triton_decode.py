"""Split flash decoding over paged latents: each row is read once, as key and as value.

The line of all sequences' tiles is cut into equal parts, one program each. A sequence inside one part is written out at
once; pieces of a sequence cut across parts go to a buffer and a second kernel joins them. Piece (part p, sequence b)
has number p + b: along the line either grows at every cut, so numbers never repeat.

Shapes in this file: B sequences, J pieces, H a block of heads, T rows of a tile, C latent, R rope, W = C + R, N heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.paged_plan import PagedPlan

HOST_PARTS = 6  # for the interpreter: few, but enough to cut sequences
JOIN_PIECES = 32
JOIN_WIDTH = 128


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is compiled and spread, by measurement."""

    heads: int  # of one program
    programs_per_processor: int
    num_warps: int
    num_stages: int


def tuning_for(num_heads: int, dtype: torch.dtype) -> Tuning:
    if dtype == torch.float32:  # for checking, not for speed
        return Tuning(heads=16, programs_per_processor=1, num_warps=8, num_stages=1)
    if num_heads <= 16:
        return Tuning(heads=16, programs_per_processor=1, num_warps=4, num_stages=2)
    return Tuning(heads=64, programs_per_processor=1, num_warps=8, num_stages=2)


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_PARTS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode(
    q_BNW: Tensor, pool_PSW: Tensor, plan: PagedPlan, *, scale: float, latent_width: int, tuning: Tuning | None = None
) -> Tensor:
    """Contract of `mla_decode.mla_decode`; sequences of length 0 give 0."""
    num_sequences, num_heads, row_width = q_BNW.shape
    assert num_sequences == plan.num_sequences, "one query per sequence of the plan"
    assert pool_PSW.is_contiguous(), "a layer of the pool is contiguous"
    tuning = tuning or tuning_for(num_heads, pool_PSW.dtype)
    head_blocks = triton.cdiv(num_heads, tuning.heads)
    parts = max(1, num_processors(q_BNW.device) * tuning.programs_per_processor // head_blocks)
    q_BNW = q_BNW.to(pool_PSW.dtype).contiguous()
    out_BNC = q_BNW.new_empty(num_sequences, num_heads, latent_width, dtype=torch.float32)
    pieces_JNC = q_BNW.new_empty(parts + num_sequences, num_heads, latent_width, dtype=torch.float32)
    lse_JN = q_BNW.new_empty(parts + num_sequences, num_heads, dtype=torch.float32)
    rope_width = row_width - latent_width
    _decode[(head_blocks, parts)](
        q_BNW,
        pool_PSW,
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
        T=plan.tile_tokens,
        PAGE=plan.page_tokens,
        WIDEN=q_BNW.device.type == "cpu",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    join(out_BNC, pieces_JNC, lse_JN, plan, parts=parts)
    return out_BNC


def join(out_BNC: Tensor, pieces_JNC: Tensor, lse_JN: Tensor, plan: PagedPlan, *, parts: int) -> None:
    """Write the sequences that were cut, from their pieces, and zeros for those of length 0."""
    num_sequences, num_heads, latent_width = out_BNC.shape
    width = min(JOIN_WIDTH, triton.next_power_of_2(latent_width))
    _join[(num_sequences, num_heads, triton.cdiv(latent_width, width))](
        out_BNC,
        pieces_JNC,
        lse_JN,
        plan.starts_B1,
        num_sequences,
        parts,
        N=num_heads,
        C=latent_width,
        WIDTH=width,
        PIECES=JOIN_PIECES,
        num_warps=4,
    )


@triton.jit
def _decode(
    q_ptr,
    pool_ptr,
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
    T: tl.constexpr,
    PAGE: tl.constexpr,
    WIDEN: tl.constexpr,  # the interpreter multiplies through numpy, which knows no bf16
):
    W: tl.constexpr = C + R
    part = tl.program_id(1)
    head_H = tl.program_id(0) * H + tl.arange(0, H)
    col_C = tl.arange(0, C_BLOCK)
    col_R = tl.arange(0, R_BLOCK)
    row_T = tl.arange(0, T)
    total = tl.load(starts_ptr + num_sequences)
    per_part = tl.cdiv(total, tl.num_programs(1))
    tile = part * per_part
    end = tl.minimum(tile + per_part, total)
    # The sequence a part begins in: as many sequences as end at or before its first tile come before it.
    seq_B = tl.arange(0, B_BLOCK)
    ends_B = tl.load(starts_ptr + 1 + seq_B, seq_B < num_sequences, other=2147483647)
    seq = tl.sum((ends_B <= tile).to(tl.int32))
    while tile < end:
        seq_start = tl.load(starts_ptr + seq)
        seq_end = tl.load(starts_ptr + seq + 1)
        stop = tl.minimum(end, seq_end)
        length = tl.load(lengths_ptr + seq)
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
        for first_row in tl.range((tile - seq_start) * T, (stop - seq_start) * T, T):
            page = tl.load(pages_ptr + first_row // PAGE)
            rows_ptr = pool_ptr + (page.to(tl.int64) * PAGE + first_row % PAGE) * W
            seen_T = first_row + row_T < length
            # Rows behind the end may hold anything, so they are never read: a weight of 0 lets not-a-number through.
            kv_TC = tl.load(
                rows_ptr + row_T[:, None] * W + col_C[None, :], seen_T[:, None] & (col_C < C)[None, :], other=0.0
            )
            k_TR = tl.load(
                rows_ptr + row_T[:, None] * W + C + col_R[None, :], seen_T[:, None] & (col_R < R)[None, :], other=0.0
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


@triton.jit
def _join(
    out_ptr,
    pieces_ptr,
    lse_ptr,
    starts_ptr,
    num_sequences,
    parts,
    N: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    col_C = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    per_part = tl.maximum(tl.cdiv(tl.load(starts_ptr + num_sequences), parts), 1)
    start = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    out_row_ptr = out_ptr + (seq * N + head) * C
    if start == end:
        tl.store(out_row_ptr + col_C, tl.zeros([WIDTH], tl.float32), col_C < C)
        return
    first = start // per_part
    count = (end - 1) // per_part - first + 1
    if count > 1:  # else the decode kernel wrote it
        top = tl.full([], -float("inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        acc_C = tl.zeros([WIDTH], tl.float32)
        for done in tl.range(0, count, PIECES):
            piece_J = done + tl.arange(0, PIECES)
            row_J = (first + piece_J + seq) * N + head
            lse_J = tl.load(lse_ptr + row_J, piece_J < count, other=-float("inf"))
            new_top = tl.maximum(top, tl.max(lse_J, 0))
            weight_J = tl.exp2(lse_J - new_top)
            mask_JC = (piece_J < count)[:, None] & (col_C < C)[None, :]
            piece_JC = tl.load(pieces_ptr + row_J.to(tl.int64)[:, None] * C + col_C[None, :], mask_JC, other=0.0)
            shrink = tl.exp2(top - new_top)
            acc_C = acc_C * shrink + tl.sum(piece_JC * weight_J[:, None], 0)
            total = total * shrink + tl.sum(weight_J, 0)
            top = new_top
        tl.store(out_row_ptr + col_C, acc_C / total, col_C < C)
