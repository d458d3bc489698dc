"""A model in this process as the target of an evaluation: no cluster, no cache, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.cli.eval_target import Answer, Text
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.loaded import choose_device
from kvrelay.model.single import SingleEngine
from kvrelay.router.output import Output

CHUNK_TOKENS = 1024  # as prefill nodes on CPUs
BLOCK_TOKENS = 64


class FolderTarget:
    """Implements `eval_target.Target`."""

    num_workers = 1

    def __init__(self, text: Text, *, latent_format: str = "model") -> None:
        """
        Raises:
            ModelLoadError: the checkpoint does not fit, or is damaged.
            InvalidRequestError: the model has no latent rows of that format.
        """
        device = choose_device("auto")
        self._text = text
        self._model = load_model(text.folder, dtype="auto", device=device, max_model_len=None)
        try:
            self._layout = self._model.layout(block_tokens=BLOCK_TOKENS, latent_format=latent_format)
        except ValueError as err:
            raise InvalidRequestError(str(err)) from err
        self._engine: SingleEngine | None = None
        self._room_tokens = 0
        self.max_model_len = self._model.config.max_model_len

    def describe(self) -> dict[str, Any]:
        return {
            "model": self._text.files.name,
            "dtype": self._model.dtype_name,
            "latent_format": self._layout.latent_format,
            "device": str(self._model.device),
        }

    def answer(self, prompt: str, *, chat: bool, max_tokens: int) -> Answer:
        tokenizer = self._text.tokenizer
        ids = (tokenizer.chat([("user", prompt)]) if chat else tokenizer.text(prompt)).tolist()
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=self._text.files.eos_token_ids)
        sampled = list(self._for(len(ids) + max_tokens).generate(ids, sampling, chunk_tokens=CHUNK_TOKENS))
        output = Output(self._text.files.tokenizer, stop_token_ids=sampling.stop_token_ids)
        text = output.take(sampled).text + output.finish().text
        return Answer(tuple(one.token_id for one in sampled), text, len(ids), 0)

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        found: list[float] = self._for(len(ids)).prompt_logprobs(ids, chunk_tokens=CHUNK_TOKENS).tolist()
        return found

    def _for(self, num_tokens: int) -> SingleEngine:
        """Return an engine with room for one sequence of `num_tokens`; it grows with the longest asked for."""
        if self._engine is None or num_tokens > self._room_tokens:
            layout = self._layout
            self._engine = SingleEngine(
                self._model, LatentPool(layout, layout.pages_for(num_tokens), self._model.device)
            )
            self._room_tokens = num_tokens
        return self._engine
