"""The second half of split decoding: sequences that were cut, joined from their pieces by their normalisers.

Shapes in this file: B sequences, J pieces, N heads, C latent.
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
JOIN_MANY = (128, 32)  # pieces read at once, columns of a program
JOIN_FEW = (16, 128)
# Of a part: less work than this is not worth another piece to join.
MIN_PART_TILES = 2


def joins_early(out_BNC: Tensor) -> bool:
    """Say whether decoding and joining overlap with the kernels around them.

    Only for few sequences: in large batches the next kernel's programs, waiting beside those that work, cost 2 to 7%.
    """
    return starts_early(out_BNC.device) and few_tokens_refuse(out_BNC.device.type, len(out_BNC)) is None


def join(out_BNC: Tensor, pieces_JNC: Tensor, lse_JN: Tensor, plan: PagedPlan, *, parts: int, tiles: int = 1) -> None:
    """Write the sequences that were cut, from their pieces, and zeros for those of length 0.

    Args:
        tiles: what the length of a part is a multiple of.
    """
    num_sequences, num_heads, latent_width = out_BNC.shape
    pieces, width = JOIN_MANY if parts > 8 * num_sequences else JOIN_FEW
    early = joins_early(out_BNC)
    width = min(width, triton.next_power_of_2(latent_width))
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
        PIECES=pieces,
        MIN_TILES=MIN_PART_TILES,
        TILES=tiles,
        PDL=early,
        num_warps=1,
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
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    seq = tl.program_id(0)
    head = tl.program_id(1)
    col_C = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    per_part = tl.maximum(tl.cdiv(tl.load(starts_ptr + num_sequences), parts), MIN_TILES)
    per_part = tl.cdiv(per_part, TILES) * TILES
    start = tl.load(starts_ptr + seq)
    end = tl.load(starts_ptr + seq + 1)
    out_row_ptr = out_ptr + (seq * N + head) * C
    wait_for_previous(PDL)  # the plan was ready before the first kernel of this chain
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
