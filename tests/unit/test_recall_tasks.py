"""The recall tasks and the bits-per-byte arithmetic, without a model."""

import math
import random
import sys
from pathlib import Path

import pytest

from kvrelay.model.evaluation import recall_words
from kvrelay.model.evaluation.bpb import bits_per_byte, windows
from kvrelay.model.evaluation.recall import is_correct, make_grid, make_task

FILLER = "".join(f"Part {i} of the manual is short. It says what part {i} does. " for i in range(2000))


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split(" ")]


def test_the_same_seed_gives_the_same_task_and_another_seed_another() -> None:
    first, again, other = (make_task(s, filler=FILLER, encode=encode, length_tokens=400, depth=0.5) for s in (1, 1, 2))
    assert first == again
    assert first.prompt != other.prompt


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [200, 1000, 4000])
def test_a_prompt_is_never_longer_than_asked_and_nearly_as_long(length: int, chat: bool) -> None:
    task = make_task(3, filler=FILLER, encode=encode, length_tokens=length, depth=0.3, chat=chat)
    assert length - 40 <= len(encode(task.prompt)) <= length


def test_the_asked_value_is_stated_once_and_at_its_depth() -> None:
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        task = make_task(5, filler=FILLER, encode=encode, length_tokens=2000, depth=depth)
        assert task.prompt.count(task.answer.strip()) == 1
        assert abs(task.prompt.index(task.answer.strip()) / len(task.prompt) - depth) < 0.1


def test_a_follow_up_asks_for_another_fact_of_the_same_text() -> None:
    task = make_task(8, filler=FILLER, encode=encode, length_tokens=800, depth=0.5)
    assert task.follow_up_answer.strip() in task.prompt
    assert task.follow_up_answer != task.answer


def test_a_grid_has_every_cell_and_both_forms() -> None:
    grid = make_grid(filler=FILLER, encode=encode, lengths=[300, 600], depths=[0.0, 1.0], samples=4)
    assert [(task.length_tokens, task.depth) for task in grid[::4]] == [(300, 0.0), (300, 1.0), (600, 0.0), (600, 1.0)]
    assert sum(task.chat for task in grid) == len(grid) // 2


def test_a_length_without_room_for_text_is_refused() -> None:
    with pytest.raises(ValueError, match="leave"):
        make_task(1, filler=FILLER, encode=encode, length_tokens=50, depth=0.5)


def test_an_answer_counts_only_when_nothing_changes_it() -> None:
    assert is_correct(" 48213", " 48213")
    assert is_correct("48213.\n\nQuestion:", " 48213")
    assert not is_correct(" 482137", " 48213")
    assert not is_correct(" 4821", " 48213")


def test_no_subject_of_the_evaluation_is_among_the_training_nouns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "model" / "training"))
    import fact_words  # noqa: PLC0415

    assert not set(recall_words.SUBJECTS) & set(fact_words.NOUNS)
    del sys.modules["fact_words"]


def test_windows_score_every_token_once_with_enough_context() -> None:
    rng = random.Random(0)
    for _ in range(50):
        total, window = rng.randint(1, 500), rng.randint(2, 64)
        context = rng.randrange(window)
        cut = windows(total, window_tokens=window, context_tokens=context)
        assert [i for w in cut for i in range(w.score_from, w.end)] == list(range(total))
        assert all(w.end - w.start <= window and w.score_from - w.start == min(context, w.score_from) for w in cut)


def test_bits_per_byte_of_a_fair_coin_is_one_bit_per_token() -> None:
    assert bits_per_byte([math.log(0.5)] * 80, 40) == pytest.approx(2.0)
