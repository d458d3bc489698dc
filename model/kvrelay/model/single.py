"""The engine without a network: prefill in chunks and paged decode in one process, on one device.

The tests compare it with the oracles and the nodes with it; evaluation and the hand-off baseline run on it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrelay.core.errors import CapacityError, InvalidRequestError, ServeError
from kvrelay.core.types import SampledToken, Sampling
from kvrelay.kernels.mla_decode import DecodePlan
from kvrelay.kvcache.allocator import PageAllocator, pages_of
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.decode_step import decode_forward
from kvrelay.model.prefill_step import prefill_forward
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.model.transformer import Model

Ids = Sequence[int] | npt.NDArray[np.int64]


@dataclass(slots=True)
class Session:
    """One sequence in the pool."""

    pages: Tensor  # int64, CPU, in token order
    num_tokens: int = 0  # rows in the pool
    owned_pages: list[int] = field(default_factory=list)


class SingleEngine:
    """Owns a pool's pages; not thread safe."""

    def __init__(self, model: Model, pool: LatentPool) -> None:
        self._model = model
        self._pool = pool
        self._allocator = PageAllocator(pool.num_pages)

    def open(self, num_tokens: int) -> Session:
        """Return an empty sequence with room for `num_tokens` rows.

        Raises:
            CapacityError: too few pages are free.
        """
        pages = pages_of(self._allocator.allocate(self._pool.layout.pages_for(num_tokens)))
        return Session(torch.tensor(pages, dtype=torch.int64), 0, pages)

    def close(self, session: Session) -> None:
        """Give the sequence's pages back."""
        self._allocator.release(session.owned_pages)
        session.owned_pages = []

    def prefill(
        self, session: Session, ids: Ids, *, chunk_tokens: int | None = None, all_logits: bool = False
    ) -> Tensor:
        """Compute a prompt into an empty sequence.

        Args:
            chunk_tokens: most tokens per forward pass; None = the whole prompt at once.
            all_logits: return those of every position, not only of the last.

        Returns:
            logits fp32, [prompt tokens, vocabulary] or [1, vocabulary]: row p predicts token p + 1.
        """
        logits: list[Tensor] = []
        for hidden_TD in self.chunks(session, ids, chunk_tokens):
            if all_logits:
                logits.append(self._model.logits(hidden_TD))
        return torch.cat(logits) if all_logits else self._model.logits(hidden_TD[-1:])

    def prompt_logprobs(self, ids: Sequence[int], *, chunk_tokens: int | None = None) -> Tensor:
        """Return the natural-log probability, fp32 [T - 1], of each token but the first, given those before it.

        Raises:
            CapacityError: the pool is too small.
        """
        next_ids_T = torch.tensor(ids[1:], dtype=torch.int64, device=self._model.device)
        session = self.open(len(ids))
        try:
            found, start = [], 0
            for hidden_TD in self.chunks(session, ids, chunk_tokens):
                followed = next_ids_T[start : start + len(hidden_TD)]  # one less in the last chunk
                found.append(self._model.logprobs(hidden_TD[: len(followed)], followed))
                start += len(hidden_TD)
            return torch.cat(found)
        finally:
            self.close(session)

    def chunks(self, session: Session, ids: Ids, chunk_tokens: int | None) -> Iterator[Tensor]:
        """Compute a prompt into an empty sequence; yield the last layer's output of each chunk."""
        self._check(ids)
        assert session.num_tokens == 0, "a prompt goes into an empty sequence"
        ids_T = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(self._model.device)
        slots_T = self._slots(session, len(ids))
        step = chunk_tokens or len(ids)
        for start in range(0, len(ids), step):
            chunk = ids_T[start : start + step]
            yield prefill_forward(self._model, self._pool, chunk, slots=slots_T, start=start, ntk_tokens=len(ids))
        session.num_tokens = len(ids)

    def decode_step(self, sessions: Sequence[Session], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each sequence and return logits_BV fp32 of what follows, in one forward pass."""
        lengths = [session.num_tokens + 1 for session in sessions]
        for session, length in zip(sessions, lengths, strict=True):
            if length > len(session.pages) * self._pool.layout.page_tokens:
                raise CapacityError(f"a sequence of {length} tokens outgrew its {len(session.pages)} pages")
        device = self._model.device
        plan = DecodePlan.make(
            [session.pages for session in sessions],
            lengths,
            page_tokens=self._pool.layout.page_tokens,
            device=device,
        )
        ids_B = torch.tensor(token_ids, dtype=torch.int64, device=device)
        logits_BV = decode_forward(self._model, self._pool, ids_B, plan.lengths_B - 1, plan, plan.lengths_B)
        for session, length in zip(sessions, lengths, strict=True):
            session.num_tokens = length
        return logits_BV

    def generate(
        self, ids: Sequence[int], sampling: Sampling, *, chunk_tokens: int | None = None
    ) -> Generator[SampledToken, None, None]:
        """Yield the tokens of one request; a stop token is yielded last.

        Raises:
            InvalidRequestError: an empty prompt, a token outside the vocabulary, or more tokens than the model serves.
            CapacityError: the pool is too small.
            NonFiniteLogitsError: the model produced no usable logits.
        """
        self._check(ids, sampling.max_tokens)
        session = self.open(len(ids) + sampling.max_tokens)
        try:
            state = SamplerState(sampling, ids)
            logits = self.prefill(session, ids, chunk_tokens=chunk_tokens)
            for position in range(len(ids), len(ids) + sampling.max_tokens):
                (token,) = sample(logits, [state], [position])
                if isinstance(token, ServeError):
                    raise token
                yield token
                if token.token_id in sampling.stop_token_ids or position + 1 == len(ids) + sampling.max_tokens:
                    return
                state.observe(token.token_id)
                logits = self.decode_step([session], [token.token_id])
        finally:
            self.close(session)

    def rows(self, session: Session, layer: int) -> Tensor:
        """Return a copy of the cached rows [tokens, W] of one sequence."""
        return self._pool.read(layer, self._slots(session, session.num_tokens))

    def _slots(self, session: Session, num_tokens: int) -> Tensor:
        page_tokens = self._pool.layout.page_tokens
        slots = (session.pages[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
        assert num_tokens <= len(slots), "a sequence has pages for all its tokens"
        return slots[:num_tokens].to(self._model.device)

    def _check(self, ids: Ids, max_tokens: int = 0) -> None:
        config = self._model.config
        if not len(ids):
            raise InvalidRequestError("the prompt is empty")
        numbers = np.asarray(ids, dtype=np.int64)
        if len(bad := numbers[(numbers < 0) | (numbers >= config.vocab_size)]):
            raise InvalidRequestError(f"token {bad[0]} is outside the vocabulary of {config.vocab_size}")
        if len(ids) + max_tokens > config.max_model_len:
            raise InvalidRequestError(
                f"{len(ids)} prompt tokens and {max_tokens} to generate exceed the limit of {config.max_model_len}"
            )
