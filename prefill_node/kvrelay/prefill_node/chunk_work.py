"""A chunk on its way through the layers of one rank.

Shapes in this file: T own tokens of the chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvrelay.core.shard import Span
from kvrelay.kernels.rope import RopeTables
from kvrelay.prefill_node.chunk_plan import ChunkPlan
from kvrelay.prefill_node.device_queue import Part


@dataclass(slots=True)
class ChunkWork:
    """In work, or paused between two layers: all that it needs to go on, but its request's pages."""

    tokens: Span
    plan: ChunkPlan
    ids: npt.NDArray[np.int32]  # of the chunk, and the one behind it if there is one
    hidden_TD: Tensor  # the input of the next layer; empty for a rank without rows
    rope: RopeTables | None  # None for a rank without rows
    next_layer: int = 0
    parts: Sequence[Part] = ()  # of it, that a device was given
