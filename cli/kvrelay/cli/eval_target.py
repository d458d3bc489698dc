"""What an evaluation asks: a running cluster, or a model in this process. Both give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvrelay.core.errors import InvalidRequestError
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.router.model_files import ModelFiles, read_model_files
from kvrelay.router.tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer to one prompt."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt; prefill did not compute them


class Target(Protocol):
    """Answers prompts; up to `num_workers` threads may ask at once."""

    num_workers: int
    max_model_len: int

    def describe(self) -> dict[str, Any]:
        """Return what it is, for the result file."""
        ...

    def answer(self, prompt: str, *, chat: bool, max_tokens: int) -> Answer:
        """Return the greedy answer to a text, or to a chat whose only message it is."""
        ...

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the natural-log probability of each token but the first, given those before it."""
        ...


@dataclass(frozen=True, slots=True)
class Text:
    """The tokenizer side of a checkpoint folder."""

    folder: Path
    files: ModelFiles
    tokenizer: PromptTokenizer

    @classmethod
    def of(cls, model: str | None) -> Text:
        """Read a folder; None = the embedded checkpoint.

        Raises:
            ModelLoadError: a file is missing or damaged.
            InvalidRequestError: the model has no tokenizer.
        """
        folder = Path(model) if model else embedded_checkpoint()
        files = read_model_files(folder)
        if files.tokenizer is None:
            raise InvalidRequestError(f"{folder} has no tokenizer.json; evaluations are about text")
        return cls(folder, files, PromptTokenizer(files))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        assert self.files.tokenizer is not None, "checked by `of`"
        return list(self.files.tokenizer.encode(text, add_special_tokens=False).ids)
