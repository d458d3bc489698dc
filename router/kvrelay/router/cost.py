"""What work costs on a node, in seconds. Pure.

A node publishes the coefficients of its own device; `Correction` scales them by what the router sees. Attention makes
prefill quadratic: n tokens behind c cached ones see n * c + n * n / 2 (token, visible token) pairs.

A ring of R ranks divides the work by R and adds what its exchanges take. That is published as one number that can be
measured and understood: the prompt length from which a ring is worth it. Then, for every R,
    ring(n) = alone(n) / R + (1 - 1 / R) * alone(break_even_tokens)
equals alone(n) at the break-even length, is worse below it and better above it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from kvrelay.proto.v1 import fleet_pb2

LEAST_BELIEF = 0.5
_HALF_LIFE_S = 60.0  # of a fit, per _OBSERVATIONS ...
_OBSERVATIONS = 16  # ... that it rests on: the least that nodes publish one from
_LONGEST_HALF_LIFE_S = 600.0


def belief(age_s: float, observations: int) -> float:
    """Return how much of a measurement still counts, from 1 when it is new towards 0.

    A node whose first measurements were bad, or that has been slow for a while, gets no requests and so measures
    nothing more: unless what it has said is forgotten, it is left out for ever. The more it rests on, the longer it
    holds, since a node that really is slow is tried again whenever it is forgotten.
    """
    half_life_s = min(max(1.0, observations / _OBSERVATIONS) * _HALF_LIFE_S, _LONGEST_HALF_LIFE_S)
    return float(2.0 ** (-max(0.0, age_s) / half_life_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """Coefficients of one node. The defaults are a small model on one CPU core, until the node says better."""

    start_s: float = 0.0  # of a prefill, whatever its length
    token_s: float = 1e-4  # per prompt token, on one rank
    pair_s: float = 0.0  # per (token, visible token), on one rank
    break_even_tokens: int = 0  # from this length a ring is faster than one rank; 0 = the router's setting
    relay_start_s: float = 0.0  # of a hand-off, whatever its size
    relay_token_s: float = 5e-6  # per prompt token that decode lacks
    step_s: float = 2e-3  # of a decode step of nothing
    sequence_s: float = 1e-3  # what one more sequence adds to a step
    context_token_s: float = 0.0  # what one more token of context adds to a step
    is_measured: bool = False  # the node has said so itself
    is_measured_local: bool = False  # so has a decode node of what it computes between steps
    age_s: float = 0.0  # of what it said of its own role, and ...
    observations: int = 0  # ... that it rests on; see `belief`
    local_age_s: float = 0.0
    local_observations: int = 0

    @property
    def is_believed(self) -> bool:
        """The node has said so itself, and not too long ago to refuse requests by it."""
        return self.is_measured and belief(self.age_s, self.observations) >= LEAST_BELIEF


DEFAULT_COST = NodeCost()


def published_cost(record: fleet_pb2.NodeRecord) -> NodeCost:
    """Return what a node has measured of its own role; what it has not stays at the defaults."""
    if not record.HasField("cost"):
        return DEFAULT_COST
    cost = record.cost
    if record.role == fleet_pb2.NODE_ROLE_DECODE:
        steps = NodeCost(
            step_s=cost.step_s, sequence_s=cost.sequence_s, context_token_s=cost.context_token_s, is_measured=True,
            age_s=cost.age_s, observations=cost.observations,
        )  # fmt: skip
        if not cost.token_s and not cost.start_s:
            return steps
        return replace(
            steps, start_s=cost.start_s, token_s=cost.token_s, pair_s=cost.pair_s, is_measured_local=True,
            local_age_s=cost.local_age_s, local_observations=cost.local_observations,
        )  # fmt: skip
    # A ring's own times have its exchanges in them: nothing is to be added for those.
    return NodeCost(
        start_s=cost.start_s, token_s=cost.token_s, pair_s=cost.pair_s, break_even_tokens=1, is_measured=True,
        age_s=cost.age_s, observations=cost.observations,
    )  # fmt: skip


def compute_s(cost: NodeCost, *, tokens: int, cached: int, ring_size: int, break_even_tokens: int) -> float:
    """Return the time in which a node computes `tokens` prompt tokens behind `cached` ones.

    Args:
        break_even_tokens: used when the node publishes none.
    """
    alone_s = _alone_s(cost, tokens, cached)
    if ring_size == 1:
        return cost.start_s + alone_s
    exchanges_s = _alone_s(cost, cost.break_even_tokens or break_even_tokens, 0)
    return cost.start_s + alone_s / ring_size + (1 - 1 / ring_size) * exchanges_s


def relay_s(cost: NodeCost, *, tokens: int, ring_size: int) -> float:
    """Return the time on the wire of a hand-off; the ranks of a ring write side by side."""
    return cost.relay_start_s + tokens * cost.relay_token_s / ring_size if tokens else 0.0


def step_s(cost: NodeCost, *, sequences: int, context_tokens: int) -> float:
    """Return the time of one decode step."""
    return cost.step_s + sequences * cost.sequence_s + context_tokens * cost.context_token_s


def between_tokens_s(cost: NodeCost, *, sequences: int, context_tokens: int, max_batch: int) -> float:
    """Return the time between a sequence's tokens; more than `max_batch` sequences take turns (0: there is no most).

    Args:
        context_tokens: of all sequences.
    """
    together = min(sequences, max_batch) if max_batch else sequences
    return step_s(cost, sequences=together, context_tokens=0) * sequences / together + (
        context_tokens * cost.context_token_s
    )


def _alone_s(cost: NodeCost, tokens: int, cached: int) -> float:
    return tokens * cost.token_s + (tokens * cached + tokens * tokens / 2) * cost.pair_s


@dataclass(slots=True)
class Correction:
    """How much slower (or faster) a node is than its coefficients say, from observed times.

    The logarithm of the ratio follows the observations in bounded steps, so it settles near their median: one request
    that was held up for a minute moves it no more than one that took twice as long as predicted.
    """

    log_scale: float = 0.0
    observations: int = 0
    at_s: float = 0.0  # of the latest one; for whoever has a clock

    MAX_LOG_SCALE: ClassVar[float] = math.log(16.0)  # a node that is further off has published nonsense
    _MAX_SURPRISE: ClassVar[float] = math.log(2.0)
    _LEAST_GAIN: ClassVar[float] = 0.1

    @property
    def scale(self) -> float:
        return math.exp(self.log_scale)

    def observe(self, *, predicted_s: float, observed_s: float) -> None:
        """Learn from one time; `predicted_s` is what the coefficients said, without any correction."""
        if predicted_s <= 0.0 or observed_s <= 0.0:
            return
        surprise = math.log(observed_s / predicted_s) - self.log_scale
        gain = max(self._LEAST_GAIN, 1.0 / (self.observations + 1))
        # The first observations may jump: nothing is known that they could spoil.
        limit = self.MAX_LOG_SCALE if self.observations == 0 else self._MAX_SURPRISE
        moved = self.log_scale + gain * min(max(surprise, -limit), limit)
        self.log_scale = min(max(moved, -self.MAX_LOG_SCALE), self.MAX_LOG_SCALE)
        self.observations += 1
