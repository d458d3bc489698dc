"""Recall tasks: facts hidden in a long text, one of them asked for at the end.

A task is text only; whoever runs it tokenises. Everything follows from the seed, so two runs, on two engines,
see the same prompts.
"""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.model.evaluation import recall_words as words

MIN_TEXT_TOKENS = 16

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str
    attribute: str
    value: str


@dataclass(frozen=True, slots=True)
class RecallTask:
    """One prompt of the grid. The answers start with a blank."""

    prompt: str
    answer: str
    length_tokens: int  # wanted length of the prompt; the real one is at most this
    depth: float  # where the fact stands: 0 at the start, 1 right before the question
    chat: bool  # the prompt is one user message, to be put in the chat template
    follow_up: str  # a second question about the same text ...
    follow_up_answer: str  # ... and its answer


def is_correct(generated: str, answer: str) -> bool:
    """Return whether a generated continuation gives the answer and nothing that changes it."""
    generated, answer = generated.strip(), answer.strip()
    rest = generated[len(answer) :]
    return generated.startswith(answer) and not rest[:1].isalnum()


def make_fact(rng: random.Random, subject: str) -> Fact:
    kind = rng.choice(("number", "number", "word", "person"))
    if kind == "number":
        return Fact(subject, rng.choice(words.NUMBER_ATTRIBUTES), str(rng.randrange(10_000, 100_000)))
    if kind == "word":
        return Fact(subject, rng.choice(words.WORD_ATTRIBUTES), rng.choice(words.WORDS))
    name = f"{rng.choice(words.FIRST_NAMES)} {rng.choice(words.LAST_NAMES)}"
    return Fact(subject, rng.choice(words.PERSON_ATTRIBUTES), name)


def make_task(
    seed: int,
    *,
    filler: str,
    encode: Encode,
    length_tokens: int,
    depth: float,
    distractors: int = 4,
    chat: bool = False,
) -> RecallTask:
    """Return one task of at most `length_tokens` tokens, within a sentence of it.

    Args:
        filler: plain text, longer than the prompt; a seeded piece of it is used.
        encode: the tokenizer, without special tokens; only lengths are used.
        distractors: other facts, placed anywhere; half of them share the asked attribute, half the subject's kind.

    Raises:
        ValueError: if the filler is too short for the length, or the length for the facts.
    """
    rng = random.Random(f"recall/{seed}/{length_tokens}/{depth}/{chat}")  # noqa: S311 - repeatable on purpose
    subjects = rng.sample(words.SUBJECTS, distractors + 1)
    asked = make_fact(rng, subjects[0])
    others = [make_fact(rng, subject) for subject in subjects[1:]]
    for index in range(0, len(others), 2):
        others[index] = _same_attribute(rng, asked, others[index].subject)
    statements = [" " + rng.choice(words.STATEMENTS).format(**_fields(fact)) for fact in (asked, *others)]
    question = rng.choice(words.QUESTIONS).format(**_fields(asked))
    tail = f"\n\n{question}" if chat else f"\n\nQuestion: {question}\nAnswer:"
    room = length_tokens - sum(len(encode(piece)) for piece in (*statements, tail)) - 8
    if room < MIN_TEXT_TOKENS:
        raise ValueError(
            f"{length_tokens} tokens leave {room} for text between the facts; at least {MIN_TEXT_TOKENS} needed"
        )
    text = _piece(rng, filler, encode, room)
    body = _place(rng, text, statements, depth)
    follow = rng.choice(others) if others else asked
    return RecallTask(
        prompt=body + tail,
        answer=" " + asked.value,
        length_tokens=length_tokens,
        depth=depth,
        chat=chat,
        follow_up=f"And what is the {follow.attribute} of the {follow.subject}?",
        follow_up_answer=" " + follow.value,
    )


def make_grid(
    *, filler: str, encode: Encode, lengths: Sequence[int], depths: Sequence[float], samples: int, seed: int = 0
) -> list[RecallTask]:
    """Return `samples` tasks for each length and depth; every second one is a chat."""
    return [
        make_task(
            seed * 1_000_003 + sample,
            filler=filler,
            encode=encode,
            length_tokens=length,
            depth=depth,
            chat=sample % 2 == 1,
        )
        for length in lengths
        for depth in depths
        for sample in range(samples)
    ]


def _fields(fact: Fact) -> dict[str, str]:
    return {"subject": fact.subject, "attribute": fact.attribute, "value": fact.value}


def _same_attribute(rng: random.Random, asked: Fact, subject: str) -> Fact:
    """Return a fact about another subject that differs from the asked one only in subject and value."""
    while True:
        other = make_fact(rng, subject)
        if other.attribute == asked.attribute and other.value != asked.value:
            return other


def _piece(rng: random.Random, filler: str, encode: Encode, num_tokens: int) -> str:
    """Return a seeded run of whole sentences of the filler of at most `num_tokens` tokens."""
    sample = filler[:20_000]
    span = int(num_tokens * len(sample) / max(1, len(encode(sample))))
    latest = len(filler) - 2 * span - 1000
    if latest < 0:
        raise ValueError(f"a filler of {len(filler)} characters is too short for {num_tokens} tokens")
    start = filler.find(". ", rng.randint(0, latest)) + 1
    text = filler[start : start + span + span // 4].lstrip()
    # Cut what is too much until it fits: two or three rounds, since tokens per character varies little.
    while (excess := len(encode(text)) - num_tokens) > 0:
        text = text[: len(text) - max(1, int(excess * len(text) / (num_tokens + excess)))]
    ends = sentence_ends(text)
    return text[: ends[-1]] if ends else text


def sentence_ends(text: str) -> list[int]:
    """Return the offsets right after each full stop that white space follows."""
    return [i + 1 for i in range(len(text) - 1) if text[i] == "." and text[i + 1] in " \n"]


def _place(rng: random.Random, text: str, statements: list[str], depth: float) -> str:
    """Insert the first statement at `depth` of the text and the others anywhere, each after a sentence."""
    ends = [*sentence_ends(text), len(text)]
    asked_at = ends[min(bisect.bisect_left(ends, depth * len(text)), len(ends) - 1)]
    places = [asked_at, *(rng.choice(ends) for _ in statements[1:])]
    pieces: list[str] = []
    done = 0
    for at, statement in sorted(zip(places, statements, strict=True)):
        pieces += [text[done:at], statement]
        done = at
    return "".join([*pieces, text[done:]])
