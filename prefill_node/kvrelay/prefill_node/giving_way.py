"""Whether the chunk in work gives way, between two layers, to a request that has much less to compute. Pure.

The caller sees to it that nobody gives way again before he had his share (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.core.shard import Span
from kvrelay.core.time_fit import Fitted

_MUCH = 2  # times as much counts as clearly more


@dataclass(frozen=True, slots=True)
class InWork:
    """The chunk in work, as it stands before a layer."""

    tokens: Span
    num_layers: int
    layers_left: int  # that would wait


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that could begin now."""

    key: str
    tokens: Span  # all that it has to compute


@dataclass(frozen=True, slots=True)
class Turn:
    """How a step's chunk went on rank 0."""

    took_s: float = 0.0
    num_layers: int = 1
    favoured: str | None = None  # for whom it was left


WHOLE = Turn()


def is_clearly_less(one: float, other: float) -> bool:
    """Whether so much less is to be computed that the other one should wait for it."""
    return _MUCH * one <= other


def favoured(chunk: InWork, waiting: Iterable[Waiting], *, fitted: Fitted | None, least_wait_s: float) -> str | None:
    """Return for whom a chunk gives way; None: it goes on.

    Args:
        fitted: what chunks cost on this node; None = not known yet: then tokens are compared, and every wait is long.
        least_wait_s: what is left of a chunk in shorter time is not worth a pause.
    """
    left = _cost(chunk.tokens, fitted) * chunk.layers_left / chunk.num_layers
    if left <= 0.0 or (fitted is not None and left < least_wait_s):
        return None
    costs = {one.key: _cost(one.tokens, fitted) for one in waiting}
    least = min(costs, key=costs.__getitem__, default=None)
    return least if least is not None and is_clearly_less(costs[least], left) else None


def _cost(tokens: Span, fitted: Fitted | None) -> float:
    """Return seconds, or tokens while nothing better is known."""
    if fitted is None:
        return float(tokens.num_tokens)
    return fitted.start_s + fitted.first_s * tokens.num_tokens + fitted.second_s * tokens.num_pairs
