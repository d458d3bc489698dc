"""Times between the tokens of running requests, and how uneven they are."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

_LONGEST = 10  # gaps that are listed


@dataclass(frozen=True, slots=True)
class Beside:
    """What one round saw: when tokens of each running request came, alone and while prompts were computed.

    Both begin with the last moment before, so that a gap that reaches into a window belongs to it. Seconds.
    """

    alone_s: Sequence[Sequence[float]]
    beside_s: Sequence[Sequence[float]]
    first_tokens_s: Sequence[float]  # of the prompts, since all of them were sent
    several: int = 0  # messages that brought more than one token

    @classmethod
    def joined(cls, parts: Iterable[Beside]) -> Beside:
        """Return what several nodes saw as one."""
        all_parts = list(parts)
        return cls(
            [moments for part in all_parts for moments in part.alone_s],
            [moments for part in all_parts for moments in part.beside_s],
            [at_s for part in all_parts for at_s in part.first_tokens_s],
            sum(part.several for part in all_parts),
        )

    def figures(self) -> dict[str, Any]:
        alone, beside = spread(self.alone_s), spread(self.beside_s)
        # While a whole prompt is computed hardly a token comes, so the median there is no measure of what is usual.
        for name in ("p50", "p99", "max"):
            beside[f"{name}_over_alone_p50"] = round(beside[f"{name}_ms"] / alone["p50_ms"], 3)
        return {
            "alone": alone,
            "beside": beside,
            "longest": longest(self.beside_s),
            "prompt_ttft_s": [round(at_s, 3) for at_s in self.first_tokens_s],
            "messages_of_several_tokens": self.several,
        }


def spread(moments_s: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return how the gaps of all requests spread, in ms, and the ratios that are judged."""
    gaps_ms = np.array([(b - a) * 1e3 for one in moments_s for a, b in pairwise(one)])
    p50, p99, top = np.percentile(gaps_ms, 50), np.percentile(gaps_ms, 99), gaps_ms.max()
    return {
        "gaps": len(gaps_ms),
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "max_ms": round(float(top), 3),
        "p99_over_p50": round(float(p99 / p50), 3),
        "max_over_p50": round(float(top / p50), 3),
    }


def longest(moments_s: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Return the longest gaps with the request and how long after the window's first token each began: a gap of one
    request is another thing than one of all at once."""
    began_s = min((one[0] for one in moments_s if one), default=0.0)
    gaps = [(b - a, a - began_s, number) for number, one in enumerate(moments_s) for a, b in pairwise(one)]
    return [
        {"ms": round(gap_s * 1e3, 3), "after_s": round(at_s, 3), "request": number}
        for gap_s, at_s, number in sorted(gaps, reverse=True)[:_LONGEST]
    ]


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median over rounds of each figure beside a prefill."""
    return {name: statistics.median(one["beside"][name] for one in rounds) for name in rounds[0]["beside"]}
