"""Answers of a recall run: what is kept of each, the grid's cells, and whether two runs gave the same tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvrelay.cli.eval_target import Answer
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.text_file import read_text
from kvrelay.model.evaluation.recall import RecallTask, is_correct


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and its answer."""

    length_tokens: int
    depth: float
    chat: bool
    prompt_sha256: str
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    text: str
    wanted: str
    correct: bool

    @classmethod
    def of(cls, task: RecallTask, answer: Answer) -> Asked:
        return cls(
            length_tokens=task.length_tokens,
            depth=task.depth,
            chat=task.chat,
            prompt_sha256=hashlib.sha256(task.prompt.encode()).hexdigest(),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            token_ids=answer.token_ids,
            text=answer.text,
            wanted=task.answer,
            correct=is_correct(answer.text, task.answer),
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "token_ids": list(self.token_ids)}


def cells_of(asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Return one entry per length and depth, in the order of the grid."""
    cells: dict[tuple[int, float], list[bool]] = {}
    for one in asked:
        cells.setdefault((one.length_tokens, one.depth), []).append(one.correct)
    return [
        {
            "length_tokens": length,
            "depth": depth,
            "samples": len(correct),
            "right": sum(correct),
            "accuracy": sum(correct) / len(correct),
        }
        for (length, depth), correct in cells.items()
    ]


def digest_of(asked: Sequence[Asked]) -> str:
    """Return a name for all generated tokens: equal exactly when every prompt's tokens are."""
    return hashlib.sha256(json.dumps([one.token_ids for one in asked]).encode()).hexdigest()


def num_differing(first: Sequence[Asked], second: Sequence[Asked]) -> int:
    """Return how many prompts were answered with other tokens.

    Raises:
        InvalidRequestError: the prompts are not the same.
    """
    if [one.prompt_sha256 for one in first] != [one.prompt_sha256 for one in second]:
        raise InvalidRequestError(
            "the two runs asked different prompts: lengths, depths, samples, seed, filler and tokenizer must be equal"
        )
    return sum(a.token_ids != b.token_ids for a, b in zip(first, second, strict=True))


def read_earlier(name: str) -> list[Asked]:
    """Return the prompts of an earlier result.

    Raises:
        InvalidRequestError: the file is none.
    """
    try:
        prompts = json.loads(read_text(name, InvalidRequestError))["prompts"]
        return [Asked(**{**one, "token_ids": tuple(one["token_ids"])}) for one in prompts]
    except (ValueError, LookupError, TypeError) as err:
        raise InvalidRequestError(f"{name} is no result of `kvrelay eval recall`: {err}") from err
