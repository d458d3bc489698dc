"""`checksum.checksum` on a GPU: one pass over the words, each program adds its share to the total.

Shapes in this file: I words of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels import checksum
from kvrelay.kernels.pieces import Pieces

BLOCK_WORDS = 2048
# Of one H200's copy rate: 0.82 so, 0.25 with 8 blocks and 4 warps; more live keys than registers.
BLOCKS_PER_PROGRAM, WARPS = 4, 8
PIECE_BLOCK_WORDS = 1024  # a page of 9,216 words is whole blocks; 0.87 of the copy rate
# As the device's int64 holds them.
_GOLDEN = tl.constexpr(checksum.to_signed(checksum.GOLDEN))
_STEP = tl.constexpr(checksum.to_signed(checksum.to_unsigned(BLOCK_WORDS * checksum.GOLDEN)))
_MIX_1 = tl.constexpr(checksum.to_signed(checksum.MIX_1))
_MIX_2 = tl.constexpr(checksum.to_signed(checksum.MIX_2))


def word_sum(words: Tensor, *, first_word: int) -> Tensor:
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    count = words.numel()
    if count:
        _word_sum[(triton.cdiv(count, BLOCK_WORDS * BLOCKS_PER_PROGRAM),)](
            words, total, count, first_word, BLOCK=BLOCK_WORDS, BLOCKS=BLOCKS_PER_PROGRAM, num_warps=WARPS
        )
    return total


def piece_sum(words: Tensor, pieces: Pieces) -> Tensor:
    """Return the sum of pieces of `words`, in their order, as `word_sum` of their copy would."""
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    if pieces.num_pieces:
        _piece_sum[(pieces.num_pieces,)](words, pieces.table_G3, total, BLOCK=PIECE_BLOCK_WORDS)
    return total


@triton.jit
def _mix(word, key):
    z = word + key
    # Shifts of an int64 bring in copies of the sign, so they are masked off.
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _word_sum(words_ptr, total_ptr, count, first_word, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    sum_I = tl.zeros([BLOCK], tl.int64)
    # Keys step by a constant from block to block: the product is not worth repeating, as products bound this kernel.
    key_I = (first_word + start + 1) * _GOLDEN + tl.arange(0, BLOCK).to(tl.int64) * _GOLDEN
    for block in tl.static_range(BLOCKS):
        index_I = start + block * BLOCK + tl.arange(0, BLOCK)
        word_I = tl.load(words_ptr + index_I, index_I < count, other=0)
        sum_I += tl.where(index_I < count, _mix(word_I, key_I), 0)
        key_I += _STEP
    tl.atomic_add(total_ptr, tl.sum(sum_I, 0), sem="relaxed")


@triton.jit
def _piece_sum(words_ptr, pieces_ptr, total_ptr, BLOCK: tl.constexpr):
    piece = tl.program_id(0).to(tl.int64) * 3
    first, start, count = tl.load(pieces_ptr + piece), tl.load(pieces_ptr + piece + 1), tl.load(pieces_ptr + piece + 2)
    sum_I = tl.zeros([BLOCK], tl.int64)
    lane_I = tl.arange(0, BLOCK)
    lane_key_I = lane_I.to(tl.int64) * _GOLDEN
    for block in range(0, count, BLOCK):
        inside_I = block + lane_I < count
        word_I = tl.load(words_ptr + first + block + lane_I, inside_I, other=0)
        sum_I += tl.where(inside_I, _mix(word_I, (start + block + 1) * _GOLDEN + lane_key_I), 0)
    tl.atomic_add(total_ptr, tl.sum(sum_I, 0), sem="relaxed")
