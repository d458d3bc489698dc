"""One decode step on the device: a single forward for the whole batch, then one token per sequence.

Shapes in this file: B sequences of the batch, V vocabulary. Owned by the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.core.errors import ServeError
from kvrelay.core.types import SampledToken, Sampling
from kvrelay.decode_node.scheduler import Sequence
from kvrelay.kernels.mla_decode import DecodePlan
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.decode_step import decode_forward
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.model.transformer import Model


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What the engine keeps of one running request."""

    page_table: Tensor  # int64 on the CPU, pages in token order, for prompt and output
    sampler: SamplerState

    @classmethod
    def of(cls, pages: Rows[int], sampler: SamplerState) -> SequenceState:
        return cls(torch.tensor(pages, dtype=torch.int64), sampler)


class DecodeEngine:
    """The model over the pool. A sequence writes only pages that it alone holds."""

    def __init__(self, model: Model, pool: LatentPool) -> None:
        self._model = model
        self._pool = pool

    def warm_up(self) -> None:
        """Run one step on page 0, so that the first request pays for no first use. Only before anything is reserved."""
        state = SequenceState.of([0], SamplerState(Sampling(max_tokens=1), [0]))
        self.step([Sequence(0, position=0, last_token=0, tokens_left=1, stop_ids=frozenset())], [state])

    @torch.inference_mode()
    def step(self, batch: Rows[Sequence], states: Rows[SequenceState]) -> list[SampledToken | ServeError]:
        """Write the row of each sequence's last token and choose the token after it.

        Returns:
            One token per sequence, or the error that ends that sequence alone. Tokens are counted in its sampler.
        """
        positions = [sequence.position for sequence in batch]
        lengths = [position + 1 for position in positions]
        device = self._pool.device
        plan = DecodePlan.make(
            [state.page_table for state in states],
            lengths,
            page_tokens=self._pool.layout.page_tokens,
            device=device,
        )
        ids_B = torch.tensor([sequence.last_token for sequence in batch], device=device)
        positions_B = torch.tensor(positions, device=device)
        logits_BV = decode_forward(self._model, self._pool, ids_B, positions_B, plan, positions_B + 1)
        chosen = sample(logits_BV, [state.sampler for state in states], lengths)
        for state, token in zip(states, chosen, strict=True):
            if isinstance(token, SampledToken):
                state.sampler.observe(token.token_id)
        return list(chosen)
