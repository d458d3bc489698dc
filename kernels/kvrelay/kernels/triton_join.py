"""The second half of split decoding: sequences that were cut, joined from their pieces by their normalisers.

Shapes in this file: B sequences, J pieces, N heads, H a program's heads, C latent.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.few_tokens_choice import few_tokens_refuse
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.triton_support import starts_early
from kvrelay.kernels.triton_wait import let_next_begin, wait_for_previous

# Few pieces a sequence in a large batch, hundreds of them in a batch of one: then narrow columns make enough programs.
# H200, 16 heads, attention and joining: 18 us as few with 16 pieces a sequence and 19 as many, 21 and 17 with 33.
JOIN_FEW = (4, 1, 512, 4)  # pieces read at once; heads, columns and warps of a program
JOIN_MANY = (128, 1, 32, 1)
MANY_PIECES = 24  # of a sequence, on average
# Of a part: less work than this is not worth another piece to join.
MIN_PART_TILES = 2


def joins_early(out_BNC: Tensor) -> bool:
    """Say whether decoding and joining overlap with the kernels around them.

    Only for few sequences: in large batches the next kernel's programs, waiting beside those that work, cost 2 to 7%.
    """
    return starts_early(out_BNC.device) and few_tokens_refuse(out_BNC.device.type, len(out_BNC)) is None


def join(
    out_BNC: Tensor,
    pieces_JNC: Tensor,
    lse_JN: Tensor,
    plan: PagedPlan,
    *,
    parts: int,
    early: bool,
    tiles: int = 1,
) -> None:
    """Write the sequences that were cut, from their pieces, and zeros for those of length 0.

    Args:
        early: whether this and the decode kernel begin while the one in front still runs.
        tiles: what the length of a part is a multiple of.
    """
    num_sequences, num_heads, latent_width = out_BNC.shape
    pieces, heads, width, warps = JOIN_MANY if parts > MANY_PIECES * num_sequences else JOIN_FEW
    width = min(width, triton.next_power_of_2(latent_width))
    _join[(num_sequences, triton.cdiv(num_heads, heads), triton.cdiv(latent_width, width))](
        out_BNC,
        pieces_JNC,
        lse_JN,
        plan.starts_B1,
        num_sequences,
        parts,
        N=num_heads,
        C=latent_width,
        HEADS=heads,
        WIDTH=width,
        PIECES=pieces,
        MIN_TILES=MIN_PART_TILES,
        TILES=tiles,
        PDL=early,
        num_warps=warps,
        launch_pdl=early,
    )


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
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    seq = tl.program_id(0)
    head_H = tl.minimum(tl.program_id(1) * HEADS + tl.arange(0, HEADS), N - 1)  # the last one more than once
    col_C = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    per_part = tl.maximum(tl.cdiv(tl.load(starts_ptr + num_sequences), parts), MIN_TILES)
    per_part = tl.cdiv(per_part, TILES) * TILES
    start = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    out_HC = out_ptr + ((seq * N + head_H) * C)[:, None] + col_C[None, :]
    mask_1C = (col_C < C)[None, :]
    wait_for_previous(PDL)  # the plan was ready before the first kernel of this chain
    if start == end:
        tl.store(out_HC, tl.zeros([HEADS, WIDTH], tl.float32), mask_1C)
        return
    first = start // per_part
    count = (end - 1) // per_part - first + 1
    if count > 1:  # else the decode kernel wrote it
        top_H = tl.full([HEADS], -float("inf"), tl.float32)
        total_H = tl.zeros([HEADS], tl.float32)
        acc_HC = tl.zeros([HEADS, WIDTH], tl.float32)
        for done in tl.range(0, count, PIECES):
            piece_J = done + tl.arange(0, PIECES)
            row_JH = (first + piece_J + seq)[:, None] * N + head_H[None, :]
            lse_JH = tl.load(lse_ptr + row_JH, (piece_J < count)[:, None], other=-float("inf"))
            new_top_H = tl.maximum(top_H, tl.max(lse_JH, 0))
            weight_JH = tl.exp2(lse_JH - new_top_H[None, :])
            piece_JHC = tl.load(
                pieces_ptr + row_JH.to(tl.int64)[:, :, None] * C + col_C[None, None, :],
                (piece_J < count)[:, None, None] & (col_C < C)[None, None, :],
                other=0.0,
            )
            shrink_H = tl.exp2(top_H - new_top_H)
            acc_HC = acc_HC * shrink_H[:, None] + tl.sum(piece_JHC * weight_JH[:, :, None], 0)
            total_H = total_H * shrink_H + tl.sum(weight_JH, 0)
            top_H = new_top_H
        tl.store(out_HC, acc_HC / total_H[:, None], mask_1C)
