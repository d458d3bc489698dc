"""The sampler's rule on whole batches, on the device the logits are on: only the chosen ids come to the host.

Same order and same fp64 arithmetic as `sampler`; sums over the vocabulary are added in another order, so an answer may
differ only where the uniform number is within fp64 rounding of a boundary. Log-probabilities are `sampler`'s business.

Shapes in this file: B rows of the batch, V vocabulary, F settings of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.model.sampler import LARGEST_LOGIT, SamplerState, uniform

NUM_SETTINGS = 8  # the columns of `settings_row`


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the penalties need to know of each row's text."""

    seen_BV: Tensor  # bool: in the prompt or the output
    output_BV: Tensor  # int32: times in the output


def settings_row(state: SamplerState, position: int) -> list[float]:
    """Return the F numbers that decide the token at `position` of a row, its uniform number included."""
    sampling = state.sampling
    point = uniform(seed=sampling.seed, position=position) if sampling.temperature else 0.0
    return [
        sampling.temperature, float(sampling.top_k), sampling.top_p, sampling.min_p,
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, point,
    ]  # fmt: skip


def choose(logits_BV: Tensor, settings_BF: Tensor, counts: TokenCounts | None) -> Tensor:
    """Return one token id per row, int64 [B]; a row whose logits are not finite gets any.

    Args:
        logits_BV: fp32.
        settings_BF: fp64, rows of `settings_row`, on the same device.
        counts: None when no row has penalties.
    """
    temperature, top_k, top_p, min_p, repetition, presence, frequency, point = settings_BF[:, None].unbind(-1)
    logits_BV = logits_BV.double()
    if counts is not None:
        lowered_BV = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
        logits_BV = torch.where(counts.seen_BV, lowered_BV, logits_BV)
        sent_BV = counts.output_BV > 0
        logits_BV = logits_BV - torch.where(sent_BV, presence + frequency * counts.output_BV, 0.0)
        logits_BV = logits_BV.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    peak_B1, greedy_B1 = logits_BV.max(-1, keepdim=True)
    heat = torch.where(temperature == 0, 1.0, temperature)
    weights_BV = ((logits_BV - peak_B1) / heat).exp()
    weights_BV, order_BV = torch.sort(weights_BV, dim=-1, descending=True, stable=True)
    size = weights_BV.shape[1]
    keep_B1 = torch.where(min_p > 0, (weights_BV >= min_p).sum(-1, keepdim=True), size)
    keep_B1 = torch.where(top_k > 0, torch.minimum(keep_B1, top_k.long()), keep_B1)
    keep_B1 = keep_B1.clamp(min=1)  # a row whose logits are not finite has no weight that is large enough
    mass_BV = weights_BV.cumsum(-1)
    kept_mass_B1 = mass_BV.gather(1, keep_B1 - 1)
    # The token that crosses the threshold stays, so at least one always does.
    crossing_B1 = (mass_BV < top_p * kept_mass_B1).sum(-1, keepdim=True) + 1
    keep_B1 = torch.where(top_p < 1, torch.minimum(keep_B1, crossing_B1), keep_B1)
    place_B1 = (mass_BV <= point * mass_BV.gather(1, keep_B1 - 1)).sum(-1, keepdim=True)
    drawn_B1 = order_BV.gather(1, torch.minimum(place_B1, keep_B1 - 1))
    return torch.where(temperature == 0, greedy_B1, drawn_B1)[:, 0]


class CountRows:
    """Token counts of the rows of a batch on the device, kept in step with the rows' sampler states."""

    def __init__(self, *, rows: int, vocabulary: int, device: torch.device) -> None:
        self._seen_BV = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self._output_BV = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)
        self._owners: list[SamplerState | None] = [None] * rows

    def update(self, states: Sequence[SamplerState], last_tokens: Sequence[int]) -> TokenCounts:
        """Return the counts of these rows, each row's last token included.

        To be called once per step: a row whose owner is new is copied from it, else its last token is counted.
        """
        new_rows: list[int] = []
        for row, state in enumerate(states):
            if not state.has_penalties:
                self._owners[row] = None
            elif self._owners[row] is state:
                new_rows.append(row)
            else:
                self._owners[row] = state
                self._copy(row, state)
        if new_rows:
            device = self._seen_BV.device
            where = torch.tensor([new_rows, [last_tokens[row] for row in new_rows]]).to(device, non_blocking=True)
            self._seen_BV[where[0], where[1]] = True
            self._output_BV[where[0], where[1]] += 1
        count = len(states)
        return TokenCounts(self._seen_BV[:count], self._output_BV[:count])

    def _copy(self, row: int, state: SamplerState) -> None:
        device = self._seen_BV.device
        seen, output, times = state.token_counts()
        self._seen_BV[row].zero_()[torch.from_numpy(seen).to(device)] = True
        self._output_BV[row].zero_()[torch.from_numpy(output).to(device)] = torch.from_numpy(times).to(device).int()
