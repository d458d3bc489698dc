"""Scattered pieces of a memory into one contiguous buffer and back: what the relay sends in large pieces."""

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
    _move(memory, pieces, packed, unpack=False)


def unpack_pieces(memory: Tensor, pieces: Pieces, packed: Tensor) -> None:
    """Copy `packed` to the pieces of `memory`, which do not overlap; contract of `pack_pieces` the other way."""
    _move(memory, pieces, packed, unpack=True)


def _move(memory: Tensor, pieces: Pieces, packed: Tensor, *, unpack: bool) -> None:
    assert packed.numel() >= pieces.num_words, "the buffer holds all pieces"
    if pieces.num_pieces:
        _move_pieces[(PIECE_WORDS // BLOCK_WORDS, pieces.num_pieces)](
            memory, packed, pieces.table_G3, BLOCK=BLOCK_WORDS, EVEN=pieces.is_even, UNPACK=unpack
        )


@triton.jit
def _move_pieces(memory_ptr, packed_ptr, pieces_ptr, BLOCK: tl.constexpr, EVEN: tl.constexpr, UNPACK: tl.constexpr):
    piece = tl.program_id(1).to(tl.int64) * 3
    first, start, count = tl.load(pieces_ptr + piece), tl.load(pieces_ptr + piece + 1), tl.load(pieces_ptr + piece + 2)
    if EVEN:  # then two words, 16 bytes, move at once
        first, start, count = tl.multiple_of(first, 2), tl.multiple_of(start, 2), tl.multiple_of(count, 2)
    word_I = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_I = word_I < count
    memory_I = memory_ptr + first + word_I
    packed_I = packed_ptr + start + word_I
    if UNPACK:
        tl.store(memory_I, tl.load(packed_I, inside_I, other=0), inside_I)
    else:
        tl.store(packed_I, tl.load(memory_I, inside_I, other=0), inside_I)
