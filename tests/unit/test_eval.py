"""The pure parts of `kvrelay eval`, and a target that answers by a rule instead of a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli import eval_bpb, eval_recall, heat_map
from kvrelay.cli.eval_answers import Asked, cells_of, digest_of, num_differing, read_earlier
from kvrelay.cli.eval_run import ask_all
from kvrelay.cli.eval_target import Answer, Text
from kvrelay.cli.manual import python_manual
from kvrelay.cli.parser import build_parser
from kvrelay.core.errors import InvalidRequestError, SettingsError
from kvrelay.model.evaluation.bpb import windows
from kvrelay.model.evaluation.recall import RecallTask


class Uniform:
    """Gives every token probability 1/2 and answers every prompt with token 7."""

    num_workers = 2
    max_model_len = 600

    def describe(self) -> dict[str, Any]:
        return {"model": "uniform"}

    def answer(self, prompt: str, *, chat: bool, max_tokens: int) -> Answer:
        return Answer((7,), "seven", 3, 0)

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        return [-math.log(2) * one for one in ids[1:]]  # tells which token it is about


def options(*args: str) -> argparse.Namespace:
    return build_parser().parse_args(["eval", *args])


def an_answer(*, depth: float = 0.0, correct: bool = True, token_ids: tuple[int, ...] = (1, 2)) -> Asked:
    return Asked(512, depth, False, f"prompt at {depth}", 500, 64, token_ids, " 1", " 1", correct)


def test_each_token_is_scored_once_in_its_place() -> None:
    ids = list(range(100))

    scored = [
        value
        for window in windows(99, window_tokens=16, context_tokens=5)
        for value in eval_bpb.score(Uniform(), ids, window)
    ]

    assert scored == [-math.log(2) * one for one in ids[1:]]


def test_bits_per_byte_stand_beside_those_of_xz() -> None:
    content = b"abab" * 50

    found = eval_bpb.figures([-math.log(2)] * 100, content)

    assert found["bpb"] == pytest.approx(0.5)
    assert found["xz_9e_bytes"] == len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    assert found["ratio"] == pytest.approx(found["bpb"] / found["xz_9e_bpb"])


def test_numbers_that_are_none_are_no_figure() -> None:
    with pytest.raises(InvalidRequestError, match="not finite"):
        eval_bpb.figures([-1.0, math.nan], b"ab")


def test_cells_count_right_answers_per_length_and_depth() -> None:
    asked = [an_answer(), an_answer(correct=False), an_answer(depth=1.0)]

    assert [(cell["depth"], cell["right"], cell["samples"]) for cell in cells_of(asked)] == [(0.0, 1, 2), (1.0, 1, 1)]


def test_runs_are_compared_by_tokens_not_by_scores() -> None:
    first = [an_answer(), an_answer(depth=1.0)]
    other = [an_answer(), an_answer(depth=1.0, token_ids=(1, 3))]

    assert (num_differing(first, first), num_differing(first, other)) == (0, 1)
    assert digest_of(first) == digest_of(list(first))
    assert digest_of(first) != digest_of(other)


def test_runs_over_other_prompts_are_not_comparable() -> None:
    with pytest.raises(InvalidRequestError, match="different prompts"):
        num_differing([an_answer()], [an_answer(depth=1.0)])


def test_an_earlier_result_is_read_back_as_it_was(tmp_path: Path) -> None:
    asked = [an_answer(), an_answer(depth=1.0, token_ids=(5,))]
    (tmp_path / "earlier.json").write_text(json.dumps({"prompts": [one.as_dict() for one in asked]}))

    assert read_earlier(str(tmp_path / "earlier.json")) == asked


@pytest.mark.parametrize("content", ["", "[]", '{"prompts": [{"depth": 1}]}'])
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)

    with pytest.raises(InvalidRequestError, match=r"other\.json is no result"):
        read_earlier(str(file))


def test_answers_come_in_order_from_as_many_workers_as_the_target_takes() -> None:
    at_once, most = 0, 0
    lock = threading.Lock()

    def ask(item: int) -> int:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02 * (3 - item % 3))
        with lock:
            at_once -= 1
        return item

    assert ask_all(range(9), ask, num_workers=3, title="asking", unit="items") == list(range(9))
    assert most == 3


def test_the_first_failure_ends_the_run() -> None:
    asked: list[int] = []

    def ask(item: int) -> int:
        asked.append(item)
        time.sleep(0.01 * min(item, 1))  # or one worker may be through before the failure is seen
        raise InvalidRequestError(f"item {item}")

    with pytest.raises(InvalidRequestError, match="item 0"):
        ask_all(range(1000), ask, num_workers=1, title="asking", unit="items")
    assert len(asked) < 1000


def test_the_grid_keeps_within_the_model_and_the_seed_decides_it() -> None:
    text, filler = Text.of(None), python_manual()
    wanted = options("recall", "--lengths", "300,600", "--depths", "0.5", "--samples", "2")

    tasks = eval_recall.tasks_of(wanted, filler, text, Uniform())

    assert [task.chat for task in tasks] == [False, True, False, True]
    assert all(len(text.encode(task.prompt)) <= 600 - eval_recall.RESERVED_TOKENS for task in tasks)
    assert tasks == eval_recall.tasks_of(wanted, filler, text, Uniform())
    wanted.seed = 1
    assert tasks != eval_recall.tasks_of(wanted, filler, text, Uniform())


@pytest.mark.parametrize(
    ("args", "filler", "words"),
    [(("--lengths", "700"), None, "700"), (("--lengths", "20"), None, "20 tokens"), ((), "too short. " * 5, "filler")],
)
def test_a_grid_that_cannot_be_is_refused(args: tuple[str, ...], filler: str | None, words: str) -> None:
    wanted = options("recall", "--lengths", "512", *args)

    with pytest.raises(InvalidRequestError, match=words):
        eval_recall.tasks_of(wanted, filler or python_manual(), Text.of(None), Uniform())


def test_a_result_has_every_cell_and_every_prompt() -> None:
    task = RecallTask("p", " seven", 512, 0.5, False, "", "")
    asked = eval_recall.ask(Uniform(), Text.of(None), task)
    again = dataclasses.replace(asked, token_ids=(8,), cached_tokens=2)

    result = eval_recall.result_of(options("recall"), [[asked], [again]])

    assert result["accuracy"] == 1.0
    assert result["cells"][0]["accuracy"] == 1.0
    assert result["prompts"][0]["token_ids"] == [7]
    assert [one["differing_from_first"] for one in result["passes"]] == [0, 1]
    assert [one["cached_tokens"] for one in result["passes"]] == [0, 2]
    json.dumps(result)


@pytest.mark.parametrize("depths", ["2", "-0.1", "a", ""])
def test_depths_outside_the_text_are_refused(depths: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        options("recall", f"--depths={depths}")


def test_without_the_drawing_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(SettingsError, match=r"kvrelay\[eval\]"):
        eval_recall.run(options("recall", "--png", "map.png"))


def test_a_heat_map_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heat_map.write(tmp_path / "map.png", cells_of([an_answer(), an_answer(depth=1.0)]), title="recall")

    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
