"""Whether cached tokens should be loaded from host memory or computed again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.core.shard import Span
from kvrelay.core.time_fit import Fitted
from kvrelay.core.types import LOAD_START_S

HOST_S_PER_GIB = "host_s_per_gib_max"  # counter of every rank: how long a GiB takes from host memory, as measured


def load_token_s(rank_counters: Sequence[Mapping[str, float]], *, token_bytes: int) -> float:
    """Return the time to load one token, each rank its own part beside the others; 0 = not measured yet.

    Args:
        token_bytes: of one token in all layers.
    """
    slowest = max((counters.get(HOST_S_PER_GIB, 0.0) for counters in rank_counters), default=0.0)
    return slowest / (1 << 30) * token_bytes / max(1, len(rank_counters))


def load_pays(tokens: Span, fitted: Fitted | None, *, token_s: float, chunk_tokens: int) -> bool:
    """Return whether loading a prompt's tokens is faster than computing them.

    Args:
        fitted: what chunks cost on this node; None = not known yet: then a copy counts as faster.
        token_s: to load one token, as measured; 0 = not yet.
    """
    if fitted is None:
        return True
    number = tokens.num_tokens
    compute_s = number * fitted.first_in_pieces_s(chunk_tokens) + tokens.num_pairs * fitted.second_s
    return LOAD_START_S + number * token_s < compute_s
