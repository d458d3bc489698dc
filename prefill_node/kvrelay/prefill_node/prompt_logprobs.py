"""Log-probabilities of prompt tokens: what each rank says of the rows it computed, put together by rank 0.

Shapes in this file: T own tokens of the chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvrelay.core.types import PromptLogprobs
from kvrelay.kernels.device_wait import wait_for
from kvrelay.model.transformer import Model
from kvrelay.prefill_node.device_queue import to_device
from kvrelay.prefill_node.ring_plan import Rows
from kvrelay.proto.convert import prompt_logprobs_from_pb
from kvrelay.proto.v1 import ring_pb2


def score(
    model: Model, hidden_TD: Tensor, positions_T: Rows, ids: npt.NDArray[np.int32], *, first_position: int
) -> list[PromptLogprobs]:
    """Return the log-probabilities of the tokens that follow own positions, one value per run of positions.

    Args:
        hidden_TD: the last layer's output at `positions_T`.
        positions_T: ascending.
        ids: the prompt from `first_position` to the token behind the chunk, or to the prompt's end.
    """
    followed = positions_T[positions_T + 1 < first_position + len(ids)]  # all, or all but the prompt's last
    if not len(followed):
        return []
    next_ids = to_device(ids[followed + 1 - first_position].astype(np.int64), hidden_TD.device)
    logprobs_T = model.logprobs(hidden_TD[: len(followed)], next_ids)
    wait_for(logprobs_T)
    logprobs = logprobs_T.tolist()
    starts = [0, *(np.flatnonzero(np.diff(followed) > 1) + 1).tolist(), len(followed)]
    return [PromptLogprobs(int(followed[start]) + 1, tuple(logprobs[start:end])) for start, end in pairwise(starts)]


def join(reports: Sequence[ring_pb2.RankReport]) -> PromptLogprobs | None:
    """Return what all ranks say of one chunk as one value; None when nobody has anything to say."""
    parts = [prompt_logprobs_from_pb(part) for report in reports for part in report.prompt_logprobs]
    joined: PromptLogprobs | None = None
    for part in sorted(parts, key=lambda part: part.first_position):
        assert joined is None or joined.end == part.first_position, f"nobody scored position {part.first_position}"
        joined = part if joined is None else PromptLogprobs(joined.first_position, joined.logprobs + part.logprobs)
    return joined
