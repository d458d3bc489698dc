"""Requirements of `kvrelay bench cpu` that need no timing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from kvrelay.bench import cpu
from kvrelay.cli.parser import build_parser
from kvrelay.core.errors import SettingsError


class Recorded:
    """Notes when it runs and with which prompt."""

    def __init__(self, name: str, log: list[tuple[str, tuple[int, ...]]]) -> None:
        self._name = name
        self._log = log

    def run(self, prompt: list[int], num_tokens: int) -> cpu.Timed:
        self._log.append((self._name, tuple(prompt)))
        watch = cpu.Watch()
        for _ in range(num_tokens):
            watch.lap()
        return watch.timed(range(num_tokens))


def options(*args: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "cpu", *args])


def test_both_sides_get_the_same_new_prompt_each_round_and_take_turns_at_being_first() -> None:
    log: list[tuple[str, tuple[int, ...]]] = []
    wanted = options("--rounds", "3", "--prompt-tokens", "10", "--output-tokens", "4")

    pairs = cpu.measure(Recorded("ours", log), Recorded("theirs", log), wanted, vocab_size=1000)

    rounds = log[2:]  # behind the warm-up
    assert [name for name, _ in rounds] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    prompts = [prompt for _, prompt in rounds]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 3
    assert len(pairs) == 3
    assert all(one.token_ids == (0, 1, 2, 3) and one.step_s >= 0 for pair in pairs for one in pair)


def test_without_transformers_the_bench_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(SettingsError, match="transformers, which is not installed"):
        cpu.Transformers(tmp_path)


def test_one_output_token_has_no_step_to_time() -> None:
    with pytest.raises(SettingsError, match="no decode step"):
        cpu.run(options("--output-tokens", "1"))
