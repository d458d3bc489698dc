"""Sets of small numbers as the bits of one integer. Pure."""

from __future__ import annotations

import numpy as np

_FEW = 16


def positions(mask: int) -> list[int]:
    """Return the numbers of the bits that are set, in order."""
    if mask.bit_count() > _FEW:
        raw = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        found: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
        return found
    few = []
    while mask:
        lowest = mask & -mask
        few.append(lowest.bit_length() - 1)
        mask ^= lowest
    return few
