"""Prompts that a decode node completes itself, a chunk between two steps. Pure; owned by the step thread.

A chunk is as long as fits into the pause that the other sequences may be made to wait, going by the time per token of
the chunks before. A chunk's time grows less than its length, so when one was within the pause the next one is too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.core.shard import Span
from kvrelay.decode_node.scheduler import Sequence

LEAST_TOKENS = 16  # of a chunk, however slow the device: shorter ones take hardly less time
_FADE = 0.7  # of the time per token, per chunk that took less


@dataclass(slots=True)
class Prompt:
    """The end of a prompt, to be computed behind rows that are in the pool."""

    sequence: Sequence  # joins the batch with the first token
    prompt_T: npt.NDArray[np.int32]  # the whole prompt
    next_token: int

    @property
    def prompt_tokens(self) -> int:
        return int(self.prompt_T.shape[0])


@dataclass(frozen=True, slots=True)
class Chunk:
    key: int
    tokens: Span
    ids_T: npt.NDArray[np.int32]  # of `tokens`
    prompt_tokens: int

    @property
    def is_last(self) -> bool:
        return self.tokens.end == self.prompt_tokens


class LocalPrompts:
    """The prompts in order of arrival; one is computed at a time."""

    def __init__(self, *, pause_s: float) -> None:
        """`pause_s`: longest time that a chunk may take while sequences are running."""
        self._pause_s = pause_s
        self._token_s = pause_s / LEAST_TOKENS  # nothing is known: begin with the shortest chunk
        self._prompts: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: Prompt) -> None:
        assert prompt.next_token < prompt.prompt_tokens, f"prompt {prompt.sequence.key} has nothing to compute"
        self._prompts[prompt.sequence.key] = prompt

    def leave(self, key: int) -> None:
        """Drop a prompt; unknown ones are ignored."""
        self._prompts.pop(key, None)

    def next_chunk(self, *, alone: bool) -> Chunk | None:
        """Return what to compute now, or None when nothing waits. Changes nothing: `ran` does.

        Args:
            alone: no sequence is running that would have to wait.
        """
        prompt = next(iter(self._prompts.values()), None)
        if prompt is None:
            return None
        left = prompt.prompt_tokens - prompt.next_token
        length = left if alone else min(left, max(LEAST_TOKENS, int(self._pause_s / self._token_s)))
        tokens = Span(prompt.next_token, prompt.next_token + length)
        ids_T = prompt.prompt_T[tokens.start : tokens.end]
        return Chunk(prompt.sequence.key, tokens, ids_T, prompt.prompt_tokens)

    def ran(self, chunk: Chunk, took_s: float) -> Sequence | None:
        """Record that a chunk was computed.

        Returns:
            The sequence, once its prompt is complete.
        """
        token_s = took_s / chunk.tokens.num_tokens
        self._token_s = max(token_s, _FADE * self._token_s + (1 - _FADE) * token_s, 1e-9)
        prompt = self._prompts[chunk.key]
        prompt.next_token = chunk.tokens.end
        if not chunk.is_last:
            return None
        del self._prompts[chunk.key]
        return prompt.sequence
