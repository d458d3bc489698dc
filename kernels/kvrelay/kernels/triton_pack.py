"""Scattered pieces of a memory into one contiguous buffer, which the relay sends in large pieces.

For where `cuda_write` cannot run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.pieces import PIECE_WORDS, Pieces

BLOCK_WORDS = 2048


def pack_pieces(memory: Tensor, pieces: Pieces, packed: Tensor) -> None:
    """Copy pieces of `memory` into `packed`, in their order; one launch, capturable.

    Args:
        memory: int64, one dimension, contiguous; the pieces' first words count from its beginning and are not checked.
        packed: int64 [at least pieces.num_words], on the same device.
    """
    assert packed.numel() >= pieces.num_words, "the buffer holds all pieces"
    if pieces.num_pieces:
        _pack_pieces[(PIECE_WORDS // BLOCK_WORDS, pieces.num_pieces)](
            memory, packed, pieces.table_G3, BLOCK=BLOCK_WORDS, EVEN=pieces.is_even
        )


@triton.jit
def _pack_pieces(memory_ptr, packed_ptr, pieces_ptr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    piece = tl.program_id(1).to(tl.int64) * 3
    first, start, count = tl.load(pieces_ptr + piece), tl.load(pieces_ptr + piece + 1), tl.load(pieces_ptr + piece + 2)
    if EVEN:  # then two words, 16 bytes, move at once
        first, start, count = tl.multiple_of(first, 2), tl.multiple_of(start, 2), tl.multiple_of(count, 2)
    word_I = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_I = word_I < count
    tl.store(packed_ptr + start + word_I, tl.load(memory_ptr + first + word_I, inside_I, other=0), inside_I)
