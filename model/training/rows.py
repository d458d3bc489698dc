"""Assembles training rows: plain text windows, and recall episodes that fill a row.

A row is int16 token ids [T + 1] and uint8 kinds [T + 1]; the kind of a token says how its prediction counts.
"""

import random
from dataclasses import dataclass, field

import numpy as np
from facts import CLOZES, PLAIN_FRAMES, Fact, ask, make_facts, state
from numpy.typing import NDArray
from tokenizers import Tokenizer
from vocabulary import ASSISTANT, BOS, EOS, USER, id_of

IGNORED, TEXT, ANSWER = 0, 1, 2

Ids = NDArray[np.int16]


@dataclass(slots=True)
class Episode:
    """Token pieces in order, each with one kind."""

    ids: list[Ids] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, ids: Ids, kind: int) -> None:
        self.ids.append(ids)
        self.kinds.append(kind)

    def arrays(self) -> tuple[Ids, NDArray[np.uint8]]:
        kinds = [np.full(len(ids), kind, np.uint8) for ids, kind in zip(self.ids, self.kinds, strict=True)]
        return np.concatenate(self.ids), np.concatenate(kinds)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer as text."""

    question: str
    answer: str


class RowMaker:
    """Makes rows from a token stream; all randomness comes from the `rng` given to each call."""

    def __init__(self, stream: Ids, tokenizer: Tokenizer) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._cuts = sentence_cuts(stream, tokenizer)
        self._bos, self._eos, self._user, self._assistant = (
            np.array([id_of(tokenizer, token)], np.int16) for token in (BOS, EOS, USER, ASSISTANT)
        )

    def text_row(self, rng: random.Random, row_tokens: int) -> tuple[Ids, NDArray[np.uint8]]:
        start = rng.randrange(len(self._stream) - row_tokens)
        ids = np.concatenate((self._bos, self._stream[start : start + row_tokens - 1]))
        return ids, np.full(row_tokens, TEXT, np.uint8)

    def recall_row(self, rng: random.Random, row_tokens: int, shortest: int) -> tuple[Ids, NDArray[np.uint8]]:
        """Return a row of one or several episodes; lengths are log-uniform between `shortest` and the row."""
        ids: list[Ids] = []
        kinds: list[NDArray[np.uint8]] = []
        left = row_tokens
        while left:
            wanted = int(shortest * (row_tokens / shortest) ** rng.random())
            length = left if left - wanted < shortest else wanted
            episode_ids, episode_kinds = self.episode(rng, length)
            ids.append(episode_ids)
            kinds.append(episode_kinds)
            left -= length
        return np.concatenate(ids), np.concatenate(kinds)

    def episode(self, rng: random.Random, length: int) -> tuple[Ids, NDArray[np.uint8]]:
        """Return exactly `length` tokens: text with facts, and questions about facts already stated."""
        most = max(1, min(40, (length - 60) // 60))
        facts = make_facts(rng, rng.randint(1, most))
        num_questions = rng.randint(1, max(1, min(40, (length - 60) // 60, 2 * len(facts))))
        chat = rng.random() < 0.5
        spread = rng.random() < 0.35  # questions all along the text, not only at its end
        lead = "\n\n" if rng.random() < 0.25 else " "
        order = sorted([(rng.random(), 0, fact) for fact in facts], key=lambda item: item[0])
        events: list[tuple[float, str | Turn]] = [(at, lead + state(rng, fact)) for at, _, fact in order]
        events += self._turns(rng, [(at, fact) for at, _, fact in order], num_questions, chat=chat, spread=spread)
        events.sort(key=lambda event: event[0])
        return self._assemble(rng, events, length, chat=chat)

    def _turns(
        self, rng: random.Random, stated: list[tuple[float, Fact]], count: int, *, chat: bool, spread: bool
    ) -> list[tuple[float, str | Turn]]:
        places = sorted(rng.uniform(stated[0][0], 1.0) if spread else 1.0 for _ in range(count))
        places[-1] = 1.0  # the row ends with an answer
        frame = rng.choice(PLAIN_FRAMES)
        turns: list[tuple[float, str | Turn]] = []
        previous: tuple[float, Fact] | None = None
        for at in places:
            known = [fact for stated_at, fact in stated if stated_at <= at]
            fact = rng.choice(known)
            if chat:
                leaning = previous[1] if previous is not None else None
                lead = "" if leaning and previous and previous[0] == at else rng.choice(("\n\n", "\n", " "))
                turns.append((at, Turn(lead + ask(rng, fact, leaning), " " + fact.value)))
            elif rng.random() < 0.2:
                turns.append((at, Turn(fact.fill(rng.choice(CLOZES)), " " + fact.value)))
            else:
                leaning = previous[1] if previous is not None else None
                turns.append((at, Turn(frame.replace("{q}", ask(rng, fact, leaning)), " " + fact.value)))
            previous = (at, fact)
        return turns

    def _assemble(
        self, rng: random.Random, events: list[tuple[float, str | Turn]], length: int, *, chat: bool
    ) -> tuple[Ids, NDArray[np.uint8]]:
        encoded = self._encode(events)
        marks = 2 if chat else 1  # <|assistant|> and <|eos|>, or <|eos|> alone
        fixed = 1 + int(chat) + sum(len(a) + (marks + len(b) if b is not None else 0) for a, b in encoded)
        turns = sum(b is not None for _, b in encoded)
        fixed += (turns - 1) * int(chat)  # <|user|> after every answer but the last
        while length - fixed < 0:  # too many events for a short episode: drop the oldest question
            index = next(i for i, (_, b) in enumerate(encoded) if b is not None) if turns > 1 else 0
            a, b = encoded.pop(index)
            events = events[:index] + events[index + 1 :]
            turns -= b is not None
            fixed -= len(a) + (marks + len(b) + int(chat) if b is not None else 0)
        start, cuts = self._region(rng, length - fixed)
        return self._write(events, encoded, start, cuts, length - fixed, chat=chat)

    def _write(
        self,
        events: list[tuple[float, str | Turn]],
        encoded: list[tuple[Ids, Ids | None]],
        start: int,
        cuts: NDArray[np.int64],
        text_tokens: int,
        *,
        chat: bool,
    ) -> tuple[Ids, NDArray[np.uint8]]:
        episode = Episode()
        episode.add(self._bos, IGNORED)
        if chat:
            episode.add(self._user, IGNORED)
        done, end = start, start + text_tokens
        last_turn = max(i for i, (_, b) in enumerate(encoded) if b is not None)
        for index, ((at, _), (first, answer)) in enumerate(zip(events, encoded, strict=True)):
            cut = end if at >= 1.0 else int(cuts[np.searchsorted(cuts, start + at * text_tokens)])
            if cut > done:
                episode.add(self._stream[done:cut], TEXT)
                done = cut
            episode.add(first, IGNORED)
            if answer is None:
                continue
            if chat:
                episode.add(self._assistant, IGNORED)
            episode.add(answer, ANSWER)
            episode.add(self._eos, ANSWER)
            if chat and index != last_turn:
                episode.add(self._user, IGNORED)
        return episode.arrays()

    def _region(self, rng: random.Random, text_tokens: int) -> tuple[int, NDArray[np.int64]]:
        """Return a stretch of the stream that ends after a sentence, and the sentence ends inside it."""
        while True:
            end = int(self._cuts[rng.randrange(len(self._cuts))])
            start = end - text_tokens
            if start >= 0:
                low = np.searchsorted(self._cuts, start)
                return start, self._cuts[low : np.searchsorted(self._cuts, end) + 1]

    def _encode(self, events: list[tuple[float, str | Turn]]) -> list[tuple[Ids, Ids | None]]:
        texts: list[str] = []
        for _, event in events:
            texts += [event.question, event.answer] if isinstance(event, Turn) else [event]
        batch = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [
            (np.array(next(batch).ids, np.int16), np.array(next(batch).ids, np.int16) if isinstance(e, Turn) else None)
            for _, e in events
        ]


def sentence_cuts(stream: Ids, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the positions right after a token that ends in a full stop and before one that starts with a blank.

    A sentence put there is tokenised as it would be in the joined text.
    """
    names = [tokenizer.id_to_token(i) or "?" for i in range(tokenizer.get_vocab_size())]
    stops = np.array([name.endswith(".") for name in names])
    blanks = np.array([name[0] in "ĠĊ" for name in names])
    return np.flatnonzero(stops[stream[:-1]] & blanks[stream[1:]]) + 1
