"""One decode step on the device: a single forward for the whole batch, then one token per sequence.

Shapes in this file: B sequences of the batch, V vocabulary. Owned by the step thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.core.errors import ServeError
from kvrelay.core.shard import Span
from kvrelay.core.types import SampledToken, Sampling
from kvrelay.decode_node.local_prefill import LEAST_TOKENS, Chunk
from kvrelay.decode_node.scheduler import Sequence
from kvrelay.kernels.mla_decode import DecodePlan
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.decode_graphs import DecodeGraphs, StepRow
from kvrelay.model.decode_step import decode_forward
from kvrelay.model.prefill_step import prefill_forward
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.model.transformer import Model

_FIRST_USES = (  # the ways to choose a token that run different kernels
    Sampling(max_tokens=1),
    Sampling(max_tokens=1, temperature=1.0, top_k=2, top_p=0.9, min_p=0.01),
    Sampling(max_tokens=1, logprobs=1),
)


@dataclass(slots=True)
class SequenceState:
    """What the engine keeps of one running request."""

    page_table: Tensor  # int64 on the CPU until `prepare`, pages in token order, for prompt and output
    sampler: SamplerState

    @classmethod
    def of(cls, pages: Rows[int], sampler: SamplerState) -> SequenceState:
        return cls(torch.tensor(pages, dtype=torch.int64), sampler)


class DecodeEngine:
    """The model over the pool. A sequence writes only pages that it alone holds.

    On a GPU the steps are recorded graphs; elsewhere each is computed as it comes.
    """

    def __init__(self, model: Model, pool: LatentPool, *, max_batch: int) -> None:
        """
        Args:
            max_batch: most sequences of one step.
        """
        self._model = model
        self._pool = pool
        self._graphs: DecodeGraphs | None = None
        if pool.device.type == "cuda":
            max_tokens = model.config.max_model_len
            self._graphs = DecodeGraphs(model, pool, max_batch=max_batch, max_tokens=max_tokens)

    @property
    def runs_beside(self) -> bool:
        """A device computes a step while the thread that launched it is free."""
        return self._graphs is not None

    def bind_thread(self) -> None:
        """Let the calling thread compute; once, before its first step."""
        self._pool.bind_thread()

    def prepare(self, state: SequenceState) -> None:
        """Do ahead of a sequence's first step what that would have to: it may be waited for. Not before `extend`."""
        if self._graphs is not None:
            state.page_table = state.page_table.pin_memory().to(self._pool.device, non_blocking=True)

    def keep_awake(self) -> None:
        """Run a step of no sequences, if steps are recorded: it changes nothing and keeps the device's clocks up."""
        if self._graphs is not None:
            self._graphs.run([])

    def warm_up(self, *, prompts: bool = False) -> None:
        """Record all steps and run some on page 0, so that no request pays for a first use, nor those beside it.

        Only before anything is reserved.

        Args:
            prompts: also compute a short one, in two chunks.
        """
        if self._graphs is not None:
            self._graphs.record_all()
        for sampling in _FIRST_USES:
            state = SequenceState.of([0], SamplerState(sampling, [0]))
            self.step([Sequence(0, position=0, last_token=0, tokens_left=1, stop_ids=frozenset())], [state])
        if prompts:
            state = SequenceState.of([0], SamplerState(_FIRST_USES[0], [0]))
            half = np.zeros(LEAST_TOKENS, np.int32)
            for tokens in (Span(0, LEAST_TOKENS), Span(LEAST_TOKENS, 2 * LEAST_TOKENS)):
                self.extend(Chunk(0, tokens, half, 2 * LEAST_TOKENS), state)

    @torch.inference_mode()
    def step(
        self, batch: Rows[Sequence], states: Rows[SequenceState], *, meanwhile: Callable[[], None] | None = None
    ) -> list[SampledToken | ServeError]:
        """Write the row of each sequence's last token and choose the token after it.

        Args:
            meanwhile: called once while a device computes, if `runs_beside`.

        Returns:
            One token per sequence, or the error that ends that sequence alone. Tokens are counted in its sampler.
        """
        if self._graphs is not None:
            rows = [
                StepRow(state.page_table, sequence.last_token, sequence.position, state.sampler)
                for sequence, state in zip(batch, states, strict=True)
            ]
            chosen = self._graphs.run(rows, meanwhile=meanwhile)
        else:
            chosen = self._computed(batch, states)
        for state, token in zip(states, chosen, strict=True):
            if isinstance(token, SampledToken):
                state.sampler.observe(token.token_id)
        return chosen

    @torch.inference_mode()
    def extend(self, chunk: Chunk, state: SequenceState) -> SampledToken | ServeError | None:
        """Compute prompt tokens whose prefix is in the pool already, and write their rows.

        Returns:
            After the prompt's last token the first token of the answer, or the error that ends the sequence.
        """
        device, page_tokens = self._pool.device, self._pool.layout.page_tokens
        slots = (state.page_table[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
        hidden_TD = prefill_forward(
            self._model,
            self._pool,
            torch.from_numpy(chunk.ids_T.astype(np.int64)).to(device),
            slots=slots[: chunk.tokens.end].to(device),
            start=chunk.tokens.start,
            ntk_tokens=chunk.prompt_tokens,
        )
        if not chunk.is_last:
            return None
        (token,) = sample(self._model.logits(hidden_TD[-1:]), [state.sampler], [chunk.prompt_tokens])
        if isinstance(token, SampledToken):
            state.sampler.observe(token.token_id)
        return token

    def _computed(self, batch: Rows[Sequence], states: Rows[SequenceState]) -> list[SampledToken | ServeError]:
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
        return list(sample(logits_BV, [state.sampler for state in states], lengths))
