"""`checksum.checksum` on a GPU: one pass over the words, each program adds its share to the total.

Shapes in this file: I words of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels import checksum

BLOCK_WORDS = 2048
BLOCKS_PER_PROGRAM = 8
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
            words, total, count, first_word, BLOCK=BLOCK_WORDS, BLOCKS=BLOCKS_PER_PROGRAM
        )
    return total


def slot_sum(words: Tensor, slots: Tensor, *, first_word: int) -> Tensor:
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    row_words = words.shape[1]
    rows = max(1, BLOCK_WORDS // triton.next_power_of_2(row_words))
    if slots.numel():
        _slot_sum[(triton.cdiv(slots.numel(), rows),)](
            words,
            slots,
            total,
            slots.numel(),
            first_word,
            ROW=row_words,
            BLOCK=triton.next_power_of_2(row_words),
            ROWS=triton.next_power_of_2(rows),
        )
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
def _slot_sum(
    words_ptr,
    slots_ptr,
    total_ptr,
    count,
    first_word,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot_T = tl.load(slots_ptr + row_T, row_T < count, other=0)
    col_I = tl.arange(0, BLOCK)
    here_TI = (row_T < count)[:, None] & (col_I < ROW)[None, :]
    word_TI = tl.load(words_ptr + slot_T[:, None] * ROW + col_I[None, :], here_TI, other=0)
    key_TI = (first_word + row_T * ROW + 1)[:, None] * _GOLDEN + (col_I.to(tl.int64) * _GOLDEN)[None, :]
    mixed_TI = tl.where(here_TI, _mix(word_TI, key_TI), 0)
    tl.atomic_add(total_ptr, tl.sum(tl.sum(mixed_TI, 1), 0), sem="relaxed")
