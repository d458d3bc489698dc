"""Choosing tokens: a pure function of logits, settings, seed and position, so every node and every retry agrees.

The order is: penalties, temperature, min-p, top-k, top-p, then one uniform number u = Philox(seed, position) against
the cumulative distribution in descending order of probability (equal ones by token id). The position of a token is
its index in prompt plus output: the first token after a prompt of n tokens has position n.
"""

# Shapes in this file: B rows of the batch, V vocabulary.
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrelay.core.errors import ServeError
from kvrelay.core.types import SampledToken, Sampling, TokenLogprob
from kvrelay.kernels.device_wait import wait_for

Row = npt.NDArray[np.float64]
# Penalised logits stay inside, so that their differences are numbers whatever the settings are.
LARGEST_LOGIT = 1e300


class NonFiniteLogitsError(ServeError):
    """A row of logits has no finite maximum, so no token can be chosen. Ends that request only."""

    def __init__(self, position: int, maximum: float) -> None:
        super().__init__(f"logits for position {position} have maximum {maximum}")


class SamplerState:
    """What one request's sampling remembers: which tokens its prompt and its output hold. Owned by the step thread."""

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int] | npt.NDArray[np.int32], num_sent: int = 0
    ) -> None:
        """Rebuild the state of a request.

        Args:
            prompt_ids: prompt, followed by output tokens that were sent before a retry.
            num_sent: how many of the last prompt_ids are such output.
        """
        self.sampling = sampling
        ids = np.asarray(prompt_ids if _has_penalties(sampling) else (), dtype=np.int64)
        self._seen = set(np.unique(ids).tolist())  # a prompt may have a million tokens
        self._output = Counter(ids[len(ids) - num_sent :].tolist() if num_sent else ())

    def observe(self, token_id: int) -> None:
        """Count a token that became output."""
        if _has_penalties(self.sampling):
            self._seen.add(token_id)
            self._output[token_id] += 1

    @property
    def has_penalties(self) -> bool:
        """True when what the text holds changes the logits."""
        return _has_penalties(self.sampling)

    def token_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (tokens of prompt or output, tokens of the output, how often each of those), for the penalties."""
        seen = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
        output = np.fromiter(self._output, dtype=np.int64, count=len(self._output))
        return seen, output, np.fromiter(self._output.values(), dtype=np.int64, count=len(self._output))

    @property
    def is_plain_greedy(self) -> bool:
        """True when the argmax of the raw logits is the answer."""
        sampling = self.sampling
        return sampling.temperature == 0 and sampling.logprobs is None and not _has_penalties(sampling)

    def penalise(self, logits_V: Row) -> Row:
        """Return logits after repetition, presence and frequency penalties (a copy when any applies)."""
        sampling = self.sampling
        if not _has_penalties(sampling):
            return logits_V
        logits_V = logits_V.copy()
        seen, output, times = self.token_counts()
        if sampling.repetition_penalty != 1.0:
            picked = logits_V[seen]
            with np.errstate(all="ignore"):
                logits_V[seen] = np.where(
                    picked > 0, picked / sampling.repetition_penalty, picked * sampling.repetition_penalty
                )
        logits_V[output] -= sampling.presence_penalty + sampling.frequency_penalty * times.astype(np.float64)
        return np.clip(logits_V, -LARGEST_LOGIT, LARGEST_LOGIT)


def sample(
    logits_BV: Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[SampledToken | NonFiniteLogitsError]:
    """Choose one token per row.

    Args:
        logits_BV: fp32, any device; one copy to the host.
        states: one per row; not changed (call `observe` with what was taken).
        positions: index that each chosen token will have in its prompt plus output.
    Returns:
        one token per row, or the error of a row whose logits are not finite; other rows are unaffected.
    """
    best_B, arg_B = logits_BV.max(dim=-1)
    wait_for(arg_B)
    best, arg = best_B.tolist(), arg_B.tolist()
    plain = all(state.is_plain_greedy for state in states)
    host_BV = None if plain else logits_BV.to("cpu", torch.float64).numpy()
    chosen: list[SampledToken | NonFiniteLogitsError] = []
    for index, (state, position) in enumerate(zip(states, positions, strict=True)):
        if not np.isfinite(best[index]):
            chosen.append(NonFiniteLogitsError(position, best[index]))
        elif state.is_plain_greedy:
            chosen.append(SampledToken(arg[index]))
        else:
            assert host_BV is not None
            chosen.append(_sample_row(host_BV[index], state, position))
    return chosen


def uniform(*, seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at `position`; equal on every machine.

    Source: Salmon et al. 2011, Philox4x64-10 as in NumPy; key = seed, counter = position.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _sample_row(logits_V: Row, state: SamplerState, position: int) -> SampledToken:
    sampling = state.sampling
    adjusted_V = state.penalise(logits_V)
    if sampling.temperature == 0:
        token = int(adjusted_V.argmax())
    else:
        # The peak is taken off first: divided by a tiny temperature it would be infinite, and its weight no number.
        # Settings outside the limits, which only a caller of the node itself can send, get some token and no exception.
        with np.errstate(all="ignore"):
            scaled_V = (adjusted_V - adjusted_V.max()) / sampling.temperature
            kept, weights = _filter(scaled_V, sampling)
        if not len(kept):
            kept, weights = np.array([adjusted_V.argmax()]), np.ones(1)
        cdf = np.cumsum(weights)
        point = uniform(seed=sampling.seed, position=position) * cdf[-1]
        token = int(kept[min(int(np.searchsorted(cdf, point, side="right")), len(kept) - 1)])
    return SampledToken(token, None if sampling.logprobs is None else _logprob(logits_V, token, sampling.logprobs))


def _filter(scaled_V: Row, sampling: Sampling) -> tuple[npt.NDArray[np.int64], Row]:
    """Return (token ids, unnormalised probabilities) that survive, most likely first; the largest of scaled_V is 0."""
    weights_V = np.exp(scaled_V)
    keep = len(weights_V)
    if sampling.min_p > 0:
        keep = int(np.count_nonzero(weights_V >= sampling.min_p))  # the largest is 1
    if sampling.top_k > 0:
        keep = min(keep, sampling.top_k)
    order = _largest(weights_V, keep)
    weights = weights_V[order]
    if sampling.top_p < 1 and len(weights):
        mass = np.cumsum(weights)
        # The token that crosses the threshold stays, so at least one always does.
        keep = int(np.searchsorted(mass, sampling.top_p * mass[-1], side="left")) + 1
        weights = weights[:keep]
    return order[: len(weights)], weights


def _largest(numbers_V: Row, count: int) -> npt.NDArray[np.int64]:
    """Return the places of the `count` largest numbers, largest first, equal ones by place; the rest is not sorted."""
    if count >= len(numbers_V):
        return np.argsort(-numbers_V, kind="stable")
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(numbers_V, len(numbers_V) - count)[-count]
    (candidates,) = np.nonzero(numbers_V >= least)  # by place; more than `count` when several equal the least
    return candidates[np.argsort(-numbers_V[candidates], kind="stable")[:count]]


def _logprob(logits_V: Row, token: int, num_top: int) -> TokenLogprob:
    peak = logits_V.max()
    log_total = peak + np.log(np.exp(logits_V - peak).sum())
    top = _largest(logits_V, num_top)
    return TokenLogprob(
        token,
        float(logits_V[token] - log_total),
        tuple((int(index), float(logits_V[index] - log_total)) for index in top),
    )


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
