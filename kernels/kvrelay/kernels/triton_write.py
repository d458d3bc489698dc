"""Scattered pieces of one memory written to scattered places of another, which may belong to another device.

Shapes in this file: G pieces, U units in one round of a program, W words of a unit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGN_BYTES = 16  # moved at once
UNIT_WORDS = 1024  # a page of 64 rows in bf16 is nine of them
UNITS = 8
MOST_WORDS = 16 * UNIT_WORDS  # of a piece of a table; longer ones are cut
NUM_WARPS = 16


def pieces_to_write(copies: npt.NDArray[np.int64], device: torch.device) -> tuple[Tensor, int]:
    """Return a table of pieces [G, 3] (source word, target word, words) and the units of the longest one.

    The copy to a device does not wait for the device.

    Args:
        copies: [N, 3] source offset, target offset, bytes; multiples of ALIGN_BYTES. Offsets may be negative.
    """
    assert int(np.bitwise_or.reduce(copies, axis=None)) % ALIGN_BYTES == 0, "pieces are moved 16 bytes at a time"
    table = copies >> 3  # bytes to words
    longest = int(table[:, 2].max())
    if longest > MOST_WORDS:
        cuts = -(-table[:, 2] // MOST_WORDS)
        done = (np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * MOST_WORDS
        source, target, words = np.repeat(table, cuts, axis=0).T
        table = np.stack((source + done, target + done, np.minimum(words - done, MOST_WORDS)), axis=1)
        longest = MOST_WORDS
    on_host = torch.from_numpy(table)
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # from other memory the copy would wait for the kernels in front of it
    return on_host.to(device, non_blocking=True), -(-longest // UNIT_WORDS)


def write_pieces(
    source_address: int, target_address: int, pieces_G3: Tensor, units_each: int, *, num_programs: int
) -> None:
    """Copy pieces from the memory at one address to that at another; one launch. Nothing is checked.

    Args:
        source_address, target_address: what the pieces' words count from; multiples of ALIGN_BYTES, and in reach of
            the device that the pieces' table is on.
        pieces_G3, units_each: of `pieces_to_write`.
        num_programs: what of the device is taken for it.
    """
    assert source_address % ALIGN_BYTES == target_address % ALIGN_BYTES == 0
    _write_pieces[(num_programs,)](
        source_address,
        target_address,
        pieces_G3,
        pieces_G3.shape[0] * units_each,
        units_each,
        UNITS=UNITS,
        UNIT_WORDS=UNIT_WORDS,
        num_warps=NUM_WARPS,
    )


# Numbers as they are: otherwise each kind of them is compiled anew.
@triton.jit(do_not_specialize=["source_address", "target_address", "num_units", "units_each"])
def _write_pieces(
    source_address, target_address, pieces_ptr, num_units, units_each, UNITS: tl.constexpr, UNIT_WORDS: tl.constexpr
):
    source_ptr = tl.multiple_of(source_address.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    target_ptr = tl.multiple_of(target_address.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    word_W = tl.arange(0, UNIT_WORDS)[None, :]
    for first in range(tl.program_id(0) * UNITS, num_units, tl.num_programs(0) * UNITS):
        unit_U = first + tl.arange(0, UNITS)
        is_unit_U = unit_U < num_units
        row_U = pieces_ptr + unit_U // units_each * 3
        skip_U = unit_U % units_each * UNIT_WORDS
        source_U = tl.multiple_of(tl.load(row_U, is_unit_U, other=0) + skip_U, 2)
        target_U = tl.multiple_of(tl.load(row_U + 1, is_unit_U, other=0) + skip_U, 2)
        words_U = tl.multiple_of(tl.load(row_U + 2, is_unit_U, other=0) - skip_U, 2)
        is_word_UW = word_W < words_U[:, None]
        found_UW = tl.load(source_ptr + source_U[:, None] + word_W, is_word_UW)
        tl.store(target_ptr + target_U[:, None] + word_W, found_UW, is_word_UW)
