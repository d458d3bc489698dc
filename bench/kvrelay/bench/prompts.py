"""Prompts for live load: as long as a trace's, and as equal to each other as those were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.bench.trace import Trace


@dataclass(frozen=True, slots=True)
class Prompt:
    at_s: float
    token_ids: npt.NDArray[np.int32]
    output_tokens: int


def made_up(
    times_s: Sequence[float],
    *,
    prompt_tokens: int,
    shared_tokens: int,
    output_tokens: int,
    vocab_size: int,
    seed: int,
) -> list[Prompt]:
    """Return prompts of one length that share their first tokens and nothing else."""
    shared = _ids(seed, 0, min(shared_tokens, prompt_tokens), vocab_size)
    return [
        Prompt(
            at_s,
            np.concatenate([shared, _ids(seed, number, prompt_tokens - len(shared), vocab_size)]),
            output_tokens,
        )
        for number, at_s in enumerate(times_s, start=1)
    ]


def from_trace(trace: Trace, *, vocab_size: int, longest: int, most_output_tokens: int, seed: int) -> list[Prompt]:
    """Return the requests of a trace, scaled so that the longest prompt and its answer fit into `longest` tokens."""
    room = longest - most_output_tokens
    scale = min(1.0, room / max(one.prompt_tokens for one in trace.arrivals))
    block_tokens = max(1, int(trace.block_tokens * scale))
    prompts = []
    for number, one in enumerate(trace.arrivals):
        length = min(room, max(1, int(one.prompt_tokens * scale)))
        parts = [_ids(seed, int.from_bytes(block, "big") + 1, block_tokens, vocab_size) for block in one.blocks]
        rest = length - block_tokens * len(parts)
        if rest > 0:  # what no block names is this request's own
            parts.append(_ids(seed, -1 - number, rest, vocab_size))
        prompts.append(
            Prompt(one.at_s, np.concatenate(parts)[:length], max(1, min(one.output_tokens, most_output_tokens)))
        )
    return prompts


def _ids(seed: int, name: int, length: int, vocab_size: int) -> npt.NDArray[np.int32]:
    rng = np.random.default_rng((seed, name) if name >= 0 else (seed, -name, 1))
    return rng.integers(0, vocab_size, length, dtype=np.int32)
