"""What one request looked like from outside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """When each token of one request was seen, in seconds since the request."""

    token_ids: tuple[int, ...]
    at_s: tuple[float, ...]

    @property
    def between_s(self) -> float:
        """Mean time between tokens, from the second one on: the first gap is the hand-off."""
        return (self.at_s[-1] - self.at_s[1]) / (len(self.at_s) - 2)
