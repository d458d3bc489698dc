"""Random facts and the many ways to state them, ask for them and follow up."""

import random
from dataclasses import dataclass

import fact_words as fw

_KINDS = {
    "number": fw.split_list(fw.NUMBER_ATTRIBUTES),
    "word": fw.split_list(fw.WORD_ATTRIBUTES),
    "person": fw.split_list(fw.PERSON_ATTRIBUTES),
    "date": fw.split_list(fw.DATE_ATTRIBUTES),
    "amount": fw.split_list(fw.AMOUNT_ATTRIBUTES),
}
_KIND_WEIGHTS = {"number": 8, "word": 5, "person": 3, "date": 2, "amount": 2}

STATEMENTS = (
    "The {a} of the {s} is {v}.",
    "The {a} of the {s} is {v}.",
    "The {a} for the {s} is {v}.",
    "The {s}'s {a} is {v}.",
    "Remember that the {a} of the {s} is {v}.",
    "Note that the {a} for the {s} is {v}.",
    "Note: the {a} of the {s} is {v}.",
    "Please remember: the {s}'s {a} is {v}.",
    "As for the {s}, its {a} is {v}.",
    "The {s} has {v} as its {a}.",
    "{v} is the {a} of the {s}.",
    "By the way, the {a} of the {s} is {v}.",
    "It is known that the {a} of the {s} is {v}.",
    "The {a} of the {s} was set to {v}.",
    "For the {s}, the {a} is {v}.",
)
QUESTIONS = (
    "What is the {a} of the {s}?",
    "What is the {a} of the {s}?",
    "What is the {s}'s {a}?",
    "What is the {a} for the {s}?",
    "Tell me the {a} of the {s}.",
    "Which {a} does the {s} have?",
    "What {a} does the {s} have?",
    "Do you remember the {a} of the {s}?",
    "Give the {a} of the {s}.",
    "Please repeat the {s}'s {a}.",
    "According to the text, what is the {a} of the {s}?",
)
FOLLOW_UP_SAME_SUBJECT = ("And the {a}?", "And its {a}?", "What about its {a}?", "And what is its {a}?")
FOLLOW_UP_SAME_ATTRIBUTE = ("And of the {s}?", "What about the {s}?", "And for the {s}?", "And the {s}'s?")
FOLLOW_UP_OTHER = ("And the {a} of the {s}?", "And what is the {a} of the {s}?", "What about the {a} of the {s}?")
PLAIN_FRAMES = (
    "\n\nQuestion: {q}\nAnswer:",
    "\n\nQuestion: {q}\nAnswer:",
    "\nQuestion: {q}\nAnswer:",
    "\nQ: {q}\nA:",
    "\n\n{q}\nAnswer:",
)
CLOZES = (
    "\n\nThe {a} of the {s} is",
    "\n\nThe {s}'s {a} is",
    " So the {a} of the {s} is",
    "\nRecall: the {a} of the {s} is",
)


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str
    attribute: str
    value: str

    def fill(self, template: str) -> str:
        text = template.replace("{s}", self.subject).replace("{a}", self.attribute).replace("{v}", self.value)
        # Names take no article: "the Project Falcon" is not English.
        return text.replace("the !", "").replace("The !", "").replace("!", "") if "!" in text else text


def made_up(rng: random.Random) -> str:
    return "".join(rng.choice(fw.SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def make_subject(rng: random.Random) -> str:  # noqa: PLR0911
    """Return a noun phrase; a leading '!' marks a proper name (no article)."""
    style = rng.random()
    if style < 0.35:
        return rng.choice(fw.NOUNS)
    if style < 0.65:
        return f"{rng.choice(fw.ADJECTIVES)} {rng.choice(fw.NOUNS)}"
    if style < 0.75:
        return f"{made_up(rng)} {rng.choice(fw.NOUNS)}"
    if style < 0.83:
        return made_up(rng).lower()
    if style < 0.89:
        return f"{rng.choice(fw.NOUNS)} {rng.choice(fw.NOUNS)}"
    if style < 0.95:
        return f"!{rng.choice(fw.PREFIXES)} {rng.choice((made_up(rng), str(rng.randrange(1, 100))))}"
    return f"!{made_up(rng) if rng.random() < 0.5 else rng.choice(fw.FIRST_NAMES)}"


def make_value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        digits = rng.choice((3, 4, 4, 5, 5, 5, 5, 6, 6, 7))
        plain = str(rng.randrange(10 ** (digits - 1), 10**digits))
        return plain if rng.random() < 0.85 else f"{rng.choice('ABCDEFGHKLMNPRSTXZ')}{rng.choice('-234')}{plain}"
    if kind == "person":
        return f"{_first(rng)} {_last(rng)}" if rng.random() < 0.8 else _first(rng)
    if kind == "date":
        return f"{rng.randrange(1, 29)} {rng.choice(fw.MONTHS)} {rng.randrange(1900, 2060)}"
    if kind == "amount":
        return f"{rng.randrange(2, 5000)} {rng.choice(fw.UNITS)}"
    words = rng.choice((fw.COLOURS, fw.ANIMALS, fw.THINGS, fw.PLACES, fw.NOUNS, ()))
    word = rng.choice(words) if words else made_up(rng)
    return word if words or rng.random() < 0.5 else word.lower()


def _first(rng: random.Random) -> str:
    return rng.choice(fw.FIRST_NAMES) if rng.random() < 0.6 else made_up(rng)


def _last(rng: random.Random) -> str:
    return rng.choice(fw.LAST_NAMES) if rng.random() < 0.6 else made_up(rng)


def make_facts(rng: random.Random, count: int) -> list[Fact]:
    """Return `count` facts with no pair (subject, attribute) twice; many share one of the two."""
    subjects = [make_subject(rng) for _ in range(max(1, round(count * rng.choice((0.3, 0.5, 0.8, 1.0)))))]
    kinds = list(_KIND_WEIGHTS)
    attributes = []
    for _ in range(max(2, round(count * rng.choice((0.15, 0.3, 0.6))))):
        kind = rng.choices(kinds, list(_KIND_WEIGHTS.values()))[0]
        name = rng.choice(_KINDS[kind])
        attributes.append((kind, f"{rng.choice(fw.ADJECTIVES)} {name}" if rng.random() < 0.1 else name))
    facts: dict[tuple[str, str], Fact] = {}
    for _ in range(8 * count):
        subject, (kind, attribute) = rng.choice(subjects), rng.choice(attributes)
        facts.setdefault((subject, attribute), Fact(subject, attribute, make_value(rng, kind)))
        if len(facts) == count:
            break
    return list(facts.values())


def state(rng: random.Random, fact: Fact) -> str:
    text = fact.fill(rng.choice(STATEMENTS))
    return text[0].upper() + text[1:]


def ask(rng: random.Random, fact: Fact, previous: Fact | None) -> str:
    """Return a question for the fact; after another question it may lean on that one."""
    if previous is not None and previous != fact and rng.random() < 0.6:
        if previous.subject == fact.subject:
            return fact.fill(rng.choice(FOLLOW_UP_SAME_SUBJECT))
        if previous.attribute == fact.attribute:
            return fact.fill(rng.choice(FOLLOW_UP_SAME_ATTRIBUTE))
        return fact.fill(rng.choice(FOLLOW_UP_OTHER))
    return fact.fill(rng.choice(QUESTIONS))
