"""Prompts to token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from kvrelay.core.errors import InvalidRequestError
from kvrelay.router.chat import ChatTemplate
from kvrelay.router.model_files import ModelFiles


class PromptTokenizer:
    """Tokenizes text and chats of one model. Thread-safe; long texts belong in a thread: no other one waits for it."""

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer = files.tokenizer
        self._template = (
            None if files.chat_template is None else ChatTemplate(files.chat_template, files.special_tokens)
        )
        self._name = files.name
        self._longest_token = longest_token(self._tokenizer)
        self._bos_id: int | None = None
        if self._tokenizer is not None and files.add_bos and "bos_token" in files.special_tokens:
            self._bos_id = self._tokenizer.token_to_id(files.special_tokens["bos_token"])

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self._template is not None

    def text(self, text: str, *, max_tokens: int | None = None) -> npt.NDArray[np.int32]:
        """Return the ids of a text, begun as the model's tokenizer begins one.

        Raises:
            InvalidRequestError: the model has no tokenizer, or the text cannot be as few as `max_tokens`.
        """
        ids = self._encode(text, max_tokens, with_special=True)
        if self._bos_id is not None and (not ids or ids[0] != self._bos_id):
            ids.insert(0, self._bos_id)
        return np.array(ids, dtype=np.int32)

    def chat(self, messages: Iterable[tuple[str, str]], *, max_tokens: int | None = None) -> npt.NDArray[np.int32]:
        """Return the ids of a conversation of (role, content), rendered with the model's template.

        Args:
            messages: gone through in the thread that calls.

        Raises:
            InvalidRequestError: there is no tokenizer or template, the template refuses the messages, or they cannot
                be as few as `max_tokens`.
        """
        if self._template is None:
            raise InvalidRequestError(f"model {self._name!r} has no chat template; send text or token ids")
        # The template writes the special tokens itself.
        text = self._template.render(list(messages))
        return np.array(self._encode(text, max_tokens, with_special=False), dtype=np.int32)

    def _encode(self, text: str, max_tokens: int | None, *, with_special: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(f"model {self._name!r} has no tokenizer; send token ids")
        # A word of megabytes takes minutes of a core, which nothing can end early: refused unread.
        if (
            max_tokens is not None
            and self._longest_token
            and (size := len(text.encode())) > max_tokens * self._longest_token
        ):
            raise InvalidRequestError(
                f"the prompt is {size} bytes of text, more than {max_tokens} tokens of at most "
                f"{self._longest_token} bytes; the limit is {max_tokens} tokens"
            )
        # Of the library's calls only those for batches let other threads run meanwhile.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special)[0].ids)


def longest_token(tokenizer: Tokenizer | None) -> int:
    """Return the most bytes of text that one token can stand for, or more; 0 = no bound is known.

    Known of byte-level byte-pair tokenizers, as DeepSeek's. What drops text (a normalizer, a split that removes what it
    splits at, a special token that swallows white space, a byte that has no token) has none.
    """
    if tokenizer is None:
        return 0
    parts, vocabulary = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    splits = _flat(parts["pre_tokenizer"], "pretokenizers")
    if (
        _flat(parts["normalizer"], "normalizers")
        or not {"ByteLevel"} <= {split["type"] for split in splits} <= {"ByteLevel", "Digits", "Split"}
        or any(split.get("behavior") == "Removed" for split in splits)
        or parts["model"]["type"] != "BPE"
        or any(one["lstrip"] or one["rstrip"] for one in parts["added_tokens"])
        or not vocabulary.keys() >= set(ByteLevel.alphabet())
    ):
        return 0
    # The vocabulary spells a byte as one character, of one byte or more: never too small.
    return max(len(token.encode()) for token in vocabulary)


def _flat(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """Return a part of a tokenizer's file as the list of what it does, in order."""
    if part is None:
        return []
    return [one for inner in part[members] for one in _flat(inner, members)] if part["type"] == "Sequence" else [part]
