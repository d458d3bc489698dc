"""The overlap of held-out and training text counts what is shared and nothing else."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "model" / "training"))

from overlap import char_runs, runs, seen_in, without_shared_lines, word_runs

SHARED = "one two three four five six seven eight nine ten eleven twelve thirteen"
OWN = "red orange yellow green blue indigo violet black white grey brown pink gold"


@pytest.mark.parametrize("length", [1, 2, 13, 50])
def test_equal_runs_and_only_they_have_equal_hashes(length: int) -> None:
    items = np.random.default_rng(1).integers(0, 3, 400).astype(np.uint64)
    hashes = runs(items, length)
    slices = [tuple(items[i : i + length]) for i in range(len(items) - length + 1)]
    assert len(hashes) == len(slices)
    assert len(set(zip(hashes.tolist(), slices, strict=True))) == len(set(hashes.tolist())) == len(set(slices))


def test_a_text_shorter_than_a_run_has_none() -> None:
    assert len(word_runs("only three words")) == len(char_runs("short")) == 0


def test_shared_runs_are_counted_whatever_case_and_punctuation() -> None:
    training = ["something else", f"before, {SHARED.title()}. After"]
    assert seen_in(training, word_runs(SHARED.replace(" ", ", ")), word_runs).tolist() == [True]
    assert not seen_in(training, word_runs(OWN), word_runs).any()
    assert not seen_in([SHARED[:20], SHARED[20:]], word_runs(SHARED), word_runs).any()


def test_only_lines_with_shared_words_go() -> None:
    text = f"# Title\n\n{OWN}\n\n{SHARED} fourteen\nlast line\n"
    shared = seen_in([SHARED], word_runs(text), word_runs)
    assert without_shared_lines(text, shared) == f"# Title\n\n{OWN}\n\nlast line\n"
