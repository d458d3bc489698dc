"""Token ids to text as they come. A character that is not complete is held back; what comes out is never taken back."""

from __future__ import annotations

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"  # what a decoder makes of the beginning of a character
_MAX_INCOMPLETE = 3  # characters at the end that may change: a decoder may show each byte of one as _INCOMPLETE
_LONG_WINDOW = 32  # tokens; a longer window is cut where that changes nothing
_MAX_TAIL = 8  # tokens that the end of a window may need to be decoded right


class Detokenizer:
    """The text of one request. Everything put together equals decoding all ids at once.

    Decodes a window of recent ids: those before `_read` give context (some decoders strip a leading space), those
    after it are new. `_emitted` counts the window's characters that are out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0
        self._emitted = 0

    @property
    def holds_back(self) -> bool:
        """Is there the beginning of a character that has not come out?"""
        return self._read < len(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that became complete with this token; may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            num_safe = len(text) - min(_MAX_INCOMPLETE, len(text) - len(text.rstrip(_INCOMPLETE)))
            fresh = text[self._emitted : num_safe]
            self._emitted = max(self._emitted, num_safe)
            if len(self._window) > _LONG_WINDOW:
                self._shorten(text)
            return fresh
        fresh = text[self._emitted :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._emitted = len(self._decode(self._window))
        return fresh

    def flush(self) -> str:
        """Return what is held back, as it is; the request has ended."""
        fresh = self._decode(self._window)[self._emitted :]
        self._emitted += len(fresh)
        self._read = len(self._window)
        return fresh

    def _shorten(self, text: str) -> None:
        # Tokens that make no complete character can go on forever; without this each would decode all before it.
        num_open = len(text) - self._emitted
        for num_tail in range(1, _MAX_TAIL + 1):
            head, tail = self._window[:-num_tail], self._window[-num_tail:]
            decoded = self._decode(tail)
            if len(decoded) >= num_open and self._decode(head) + decoded == text:
                self._window, self._read, self._emitted = tail, 0, len(decoded) - num_open
                return

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
