"""Prompts to token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrelay.core.errors import InvalidRequestError
from kvrelay.router.chat import ChatTemplate
from kvrelay.router.model_files import ModelFiles


class PromptTokenizer:
    """Tokenizes text and chats of one model. Thread-safe; long texts belong in a thread."""

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer = files.tokenizer
        self._template = (
            None if files.chat_template is None else ChatTemplate(files.chat_template, files.special_tokens)
        )
        self._name = files.name
        self._bos_id: int | None = None
        if self._tokenizer is not None and files.add_bos and "bos_token" in files.special_tokens:
            self._bos_id = self._tokenizer.token_to_id(files.special_tokens["bos_token"])

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self._template is not None

    def text(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of a text, begun as the model's tokenizer begins one.

        Raises:
            InvalidRequestError: the model has no tokenizer.
        """
        ids = self._encode(text, with_special=True)
        if self._bos_id is not None and (not ids or ids[0] != self._bos_id):
            ids.insert(0, self._bos_id)
        return np.array(ids, dtype=np.int32)

    def chat(self, messages: Sequence[tuple[str, str]]) -> npt.NDArray[np.int32]:
        """Return the ids of a conversation of (role, content), rendered with the model's template.

        Raises:
            InvalidRequestError: there is no tokenizer or template, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(f"model {self._name!r} has no chat template; send text or token ids")
        # The template writes the special tokens itself.
        return np.array(self._encode(self._template.render(messages), with_special=False), dtype=np.int32)

    def _encode(self, text: str, *, with_special: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(f"model {self._name!r} has no tokenizer; send token ids")
        return list(self._tokenizer.encode(text, add_special_tokens=with_special).ids)
