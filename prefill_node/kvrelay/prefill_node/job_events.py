"""What happens to a job, as whoever asked for it hears it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.core.errors import ServeError
from kvrelay.core.types import FinishReason, PromptLogprobs, SampledToken


@dataclass(frozen=True, slots=True)
class Started:
    cached_tokens: int
    queue_ms: float


@dataclass(frozen=True, slots=True)
class Progress:
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: SampledToken
    finish_reason: FinishReason | None  # set when the request ends with this token
    compute_s: float = 0.0  # from the plan of its first chunk


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to do for the client."""

    relayed_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    error: ServeError


JobEvent = Started | Progress | PromptLogprobs | FirstToken | Done | Failed
Sink = Callable[[JobEvent], object]
