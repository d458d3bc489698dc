"""`kvrelay eval recall`: facts hidden in long texts, asked for at the end, over a grid of length and depth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvrelay.cli import heat_map
from kvrelay.cli.eval_answers import Asked, cells_of, digest_of, num_differing, read_earlier
from kvrelay.cli.eval_run import ask_all, head, publish, target_of
from kvrelay.cli.eval_target import Target, Text
from kvrelay.cli.manual import python_manual
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.text_file import read_text
from kvrelay.model.evaluation.recall import RecallTask, make_grid

SPARE_ANSWER_TOKENS = 4  # room to say more than the answer, which then is wrong
RESERVED_TOKENS = 48  # of the model's length: chat template and answer


def run(options: argparse.Namespace) -> int:
    """Ask the whole grid; return 1 when tokens differ between passes or from an earlier result."""
    if options.png:
        heat_map.require()  # before the work, not after it
    earlier = read_earlier(options.compare) if options.compare else None
    filler = read_text(options.filler, InvalidRequestError) if options.filler else python_manual()
    text = Text.of(options.model)
    with target_of(options, text) as target:
        tasks = tasks_of(options, filler, text, target)
        passes = [
            ask_all(
                tasks,
                lambda task: ask(target, text, task),
                num_workers=target.num_workers,
                title=f"pass {number + 1} of {options.repeat}",
                unit="prompts",
            )
            for number in range(options.repeat)
        ]
        result = {**head("recall", target, text), **result_of(options, passes)}
    differing = [num_differing(passes[0], again) for again in passes[1:]]
    if earlier is not None:
        result["differing_from_earlier"] = num_differing(earlier, passes[0])
        differing.append(result["differing_from_earlier"])
    if options.png:
        heat_map.write(Path(options.png), result["cells"], title=f"recall, {result['target']['model']}")
    _print(options, result)
    return 1 if any(differing) else 0


def tasks_of(options: argparse.Namespace, filler: str, text: Text, target: Target) -> list[RecallTask]:
    """Return the grid's prompts.

    Raises:
        InvalidRequestError: the model is too short for a length, or the filler too short, or a length for the facts.
    """
    longest = target.max_model_len - RESERVED_TOKENS
    if (asked := max(options.lengths)) > target.max_model_len:
        raise InvalidRequestError(f"--lengths has {asked}; the model takes {target.max_model_len} tokens")
    try:
        return make_grid(
            filler=filler,
            encode=text.encode,
            lengths=[min(length, longest) for length in options.lengths],
            depths=options.depths,
            samples=options.samples,
            seed=options.seed,
        )
    except ValueError as err:
        raise InvalidRequestError(str(err)) from err


def ask(target: Target, text: Text, task: RecallTask) -> Asked:
    """Ask one task; greedy."""
    max_tokens = len(text.encode(task.answer)) + SPARE_ANSWER_TOKENS
    return Asked.of(task, target.answer(task.prompt, chat=task.chat, max_tokens=max_tokens))


def result_of(options: argparse.Namespace, passes: list[list[Asked]]) -> dict[str, Any]:
    """Return the figures: every cell and every prompt of the first pass, and a line per pass."""
    first = passes[0]
    return {
        "lengths": list(options.lengths),
        "depths": list(options.depths),
        "samples": options.samples,
        "seed": options.seed,
        "filler": options.filler and Path(options.filler).name,
        "accuracy": sum(one.correct for one in first) / len(first),
        "tokens_digest": digest_of(first),
        "cells": cells_of(first),
        "passes": [
            {
                "accuracy": sum(one.correct for one in asked) / len(asked),
                "prompt_tokens": sum(one.prompt_tokens for one in asked),
                "cached_tokens": sum(one.cached_tokens for one in asked),
                "tokens_digest": digest_of(asked),
                "differing_from_first": num_differing(first, asked),
            }
            for asked in passes
        ],
        "prompts": [one.as_dict() for one in first],
    }


def _print(options: argparse.Namespace, result: dict[str, Any]) -> None:
    publish(options, result, in_words=_print_table)
    for number, one in enumerate(result["passes"][1:], start=2):
        cached = f"{one['cached_tokens']} of {one['prompt_tokens']} prompt tokens from the cache"
        _say(f"pass {number}: {one['differing_from_first']} prompts with other tokens than in pass 1; {cached}")
    if options.compare:
        _say(f"{result['differing_from_earlier']} prompts with other tokens than in {options.compare}")


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415 - not needed for --json
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="share of right answers", title_justify="left")
    table.add_column("prompt tokens", justify="right")
    for depth in result["depths"]:
        table.add_column(f"depth {depth:g}", justify="right")
    rows: dict[int, list[str]] = {}
    for cell in result["cells"]:
        rows.setdefault(cell["length_tokens"], []).append(f"{cell['accuracy']:.2f}")
    for length, values in rows.items():
        table.add_row(str(length), *values)
    Console().print(table)
    print(f"all: {result['accuracy']:.4f}; tokens {result['tokens_digest']}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
