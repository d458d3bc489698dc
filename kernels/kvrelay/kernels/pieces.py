"""Pieces of one memory in an order, as a table that one launch walks: what a part of the relay is made of.

Shapes in this file: G pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD_BYTES = 8
PIECE_WORDS = 16_384  # longest piece of a table; longer ranges are cut, so that one run keeps a whole device busy

Ranges = npt.NDArray[np.int64]  # [R, 2]: offset_bytes, num_bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the words of a part lie, and where each piece stands in the part."""

    table_G3: Tensor  # int64: first word in the memory, first word in the part, words
    num_words: int
    is_even: bool  # every number is even, so that 16 bytes may be moved at once

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]] | Ranges, device: torch.device) -> Pieces:
        """Return the table of ranges (offset_bytes, num_bytes), whole words each, in the order of the part.

        The copy to a device does not wait for the device.
        """
        bytes_R2 = np.asarray(ranges, dtype=np.int64).reshape(-1, 2)
        assert not (bytes_R2 % WORD_BYTES).any(), "a range is a whole number of words"
        offsets, sizes = bytes_R2.T // WORD_BYTES
        starts = np.cumsum(sizes) - sizes
        cuts = -(-sizes // PIECE_WORDS)  # per range
        within = (np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * PIECE_WORDS
        table = np.stack(
            (
                np.repeat(offsets, cuts) + within,
                np.repeat(starts, cuts) + within,
                np.minimum(np.repeat(sizes, cuts) - within, PIECE_WORDS),
            ),
            axis=1,
        )
        on_device = torch.from_numpy(table).to(device, non_blocking=True)
        return cls(on_device, int(sizes.sum()), not (table % 2).any())

    @property
    def num_pieces(self) -> int:
        return self.table_G3.shape[0]
