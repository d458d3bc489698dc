"""The output of one request: which token ids and text may leave now. Lives over all of the request's attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from kvrelay.core.types import SampledToken
from kvrelay.router.detokenizer import Detokenizer
from kvrelay.router.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """What leaves together: tokens, and the text that they complete."""

    tokens: tuple[SampledToken, ...]
    text: str

    def __bool__(self) -> bool:
        return bool(self.tokens or self.text)


@dataclass(slots=True)
class _Held:
    token: SampledToken
    end: int | None  # characters of output up to this token's end; None = its last character is not complete


class Output:
    """Takes tokens in order, gives them out with their text. Text leaves at token boundaries only.

    A token whose text is held back waits with it; none is lost. Stop tokens have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, stop_token_ids: Collection[int] = (), stop_strings: Sequence[str] = ()
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = StopStrings(stop_strings)
        self._held: list[_Held] = []
        self._unsent = ""  # safe text that has not left
        self._num_sent = 0  # characters that have left
        self._num_decoded = 0  # characters that the tokens have made
        self.token_ids: list[int] = []  # all that were taken

    @property
    def stopped(self) -> bool:
        """Has a stop string come? The text ends before it."""
        return self._stops.hit

    def take(self, tokens: Sequence[SampledToken]) -> Piece:
        """Take new tokens and return what may leave. Tokens after a stop string are ignored."""
        for token in tokens:
            if self.stopped:
                break
            self._take_one(token)
        if self.stopped:
            return self._all()
        return self._up_to(self._num_sent + len(self._unsent))

    def finish(self) -> Piece:
        """Return all that is held back; there will be no more tokens."""
        if self._detokenizer is not None and not self.stopped:
            self._unsent += self._stops.push(self._detokenizer.flush())
            self._unsent += self._stops.flush()
        return self._all()

    def _take_one(self, token: SampledToken) -> None:
        self.token_ids.append(token.token_id)
        if self._detokenizer is None or token.token_id in self._stop_token_ids:
            self._held.append(_Held(token, self._num_decoded if self._complete else None))
            return
        text = self._detokenizer.push(token.token_id)
        self._num_decoded += len(text)
        self._unsent += self._stops.push(text)
        self._held.append(_Held(token, None))
        if self._complete:
            for held in self._held:
                held.end = self._num_decoded if held.end is None else held.end

    @property
    def _complete(self) -> bool:
        return self._detokenizer is None or not self._detokenizer.holds_back

    def _up_to(self, num_safe: int) -> Piece:
        count = 0
        while count < len(self._held):
            end = self._held[count].end
            if end is None or end > num_safe:
                break
            count += 1
        if not count:
            return Piece((), "")
        end = self._held[count - 1].end
        assert end is not None, "the loop stops before it"
        tokens = tuple(held.token for held in self._held[:count])
        num_text = end - self._num_sent
        text, self._unsent = self._unsent[:num_text], self._unsent[num_text:]
        del self._held[:count]
        self._num_sent = end
        return Piece(tokens, text)

    def _all(self) -> Piece:
        piece = Piece(tuple(held.token for held in self._held), self._unsent)
        self._held.clear()
        self._num_sent += len(self._unsent)
        self._unsent = ""
        return piece
