"""What a request may ask of the sampler: checked at the router's door, and by nodes, which others may call.

All values are numbers that some buffer, message or loop grows with, or that have no meaning outside their range.
"""

from __future__ import annotations

import math

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import Sampling

MAX_STOP_TOKENS = 256  # of a client
MAX_ALL_STOP_TOKENS = 512  # with the model's own end tokens, which the router adds
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 100.0


def check_sampling(sampling: Sampling) -> None:
    """
    Raises:
        InvalidRequestError: names the value and the limit.
    """
    _within("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("top_p", sampling.top_p, 0.0, 1.0, open_below=True)
    _within("repetition_penalty", sampling.repetition_penalty, 0.0, MAX_PENALTY, open_below=True)
    if sampling.logprobs is not None and sampling.logprobs > MAX_LOGPROBS:
        raise InvalidRequestError(f"logprobs is {sampling.logprobs}; at most {MAX_LOGPROBS}")
    if len(sampling.stop_token_ids) > MAX_ALL_STOP_TOKENS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries; at most {MAX_ALL_STOP_TOKENS} with end tokens"
        )


def _within(name: str, value: float, least: float, most: float, *, open_below: bool = False) -> None:
    if not math.isfinite(value) or not least <= value <= most or (open_below and value == least):
        bracket = "(" if open_below else "["
        raise InvalidRequestError(f"{name} is {value}; it must be in {bracket}{least:g}, {most:g}]")
