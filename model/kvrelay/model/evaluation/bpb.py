"""Bits per byte of a text from a model's log-probabilities.

The text is scored in windows: every token is scored once, and all but the first window's tokens see at
least `context_tokens` before them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Score tokens [score_from, end) with tokens [start, score_from) as context; indices into the text's ids."""

    start: int
    score_from: int
    end: int


def windows(num_tokens: int, *, window_tokens: int, context_tokens: int) -> tuple[Window, ...]:
    """Cut a text of `num_tokens` into windows of at most `window_tokens`.

    Raises:
        ValueError: if the context leaves no room for a scored token.
    """
    if not 0 <= context_tokens < window_tokens:
        raise ValueError(f"context of {context_tokens} tokens does not fit a window of {window_tokens}")
    cut: list[Window] = []
    scored = 0
    while scored < num_tokens:
        start = max(0, scored - context_tokens)
        end = min(num_tokens, start + window_tokens)
        cut.append(Window(start, scored, end))
        scored = end
    return tuple(cut)


def bits_per_byte(log_probs: Iterable[float], num_bytes: int) -> float:
    """Return -sum(log_probs)/ln 2 per byte; log_probs are natural logarithms, one per token of the text."""
    if num_bytes <= 0:
        raise ValueError(f"a text of {num_bytes} bytes has no bits per byte")
    return -math.fsum(log_probs) / math.log(2) / num_bytes
