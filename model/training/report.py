"""Measures a trained run and writes the result file, again after every step, so that a stopped one keeps what it has.

python model/training/report.py --run OUT --data DATA --result bench/results/embedded-model-DEVICE-DATE.json
"""

import argparse
import datetime
import json
import lzma
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export import load_published
from measure import DEPTHS, answers_right, measure_bpb, recall_cell
from network import Network
from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version

WINDOW_SHARES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # prompt lengths, in training windows
SHORTEST_TOKENS = 256  # five facts, a question and some text
ROUND_SAMPLES = 4  # of each cell, before the next length and the next network have their turn
SEED = 7

Prompts = dict[int, list[list[tuple[list[int], list[int]]]]]  # length -> depth -> samples


@dataclass(slots=True)
class Recall:
    """Right answers of one network, counted round by round."""

    network: Network
    yarn: bool
    samples: dict[int, int]  # length -> samples of each depth to ask
    right: dict[int, list[int]] = field(default_factory=dict)  # length -> count of each depth
    asked: dict[int, int] = field(default_factory=dict)  # length -> samples of each depth so far

    def ask_more(self, prompts: Prompts, length: int) -> None:
        first = self.asked.get(length, 0)
        last = min(first + ROUND_SAMPLES, self.samples[length])
        cells = [cell[first:last] for cell in prompts[length]]
        right = np.array(answers_right(self.network, [pair for cell in cells for pair in cell], yarn=self.yarn))
        counts = right.reshape(len(cells), last - first).sum(1)
        self.right[length] = (counts + self.right.get(length, 0)).tolist()
        self.asked[length] = last

    def unfinished(self) -> list[int]:
        return [length for length, samples in self.samples.items() if self.asked.get(length, 0) < samples]

    def figures(self) -> dict[str, Any]:
        asked = {str(length): samples * len(DEPTHS) for length, samples in self.asked.items()}
        right = {str(length): sum(counts) for length, counts in self.right.items()}
        return {
            "depths": DEPTHS,
            "asked": asked,
            "right": right,
            "mean": {length: count / asked[length] for length, count in right.items()},
            "grid": {str(n): [count / self.asked[n] for count in counts] for n, counts in self.right.items()},
        }


def xz_bits_per_byte(text: str) -> float:
    """Return what `xz -9e` makes of the text."""
    raw = text.encode()
    return 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw)


def make_prompts(tokenizer: Tokenizer, text: str, samples: dict[int, int]) -> Prompts:
    """Return the prompts of the grid; one process for each core, before a GPU is touched (fork)."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        cells = {
            (length, depth): pool.submit(
                recall_cell, tokenizer, text, length=length, depth=depth, samples=count, seed=SEED
            )
            for length, count in sorted(samples.items(), reverse=True)
            for depth in DEPTHS
        }
        return {length: [cells[length, depth].result() for depth in DEPTHS] for length in samples}


class Report:
    """The figures so far; `save` is called after every step."""

    def __init__(self, path: Path, head: dict[str, Any], limit_s: float) -> None:
        self._path, self._figures = path, head
        self._ends_at_s = time.monotonic() + limit_s

    def add(self, **figures: Any) -> None:
        self._figures |= figures
        self._path.write_text(json.dumps(self._figures, indent=1) + "\n")

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() > self._ends_at_s


def measure(run: Path, text: str, report: Report, args: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    tuned, before = load_published(run / "model"), load_published(run / "model-after-window")
    window = tuned.shape.train_window_tokens
    lengths = [int(share * window) for share in WINDOW_SHARES if share * window >= SHORTEST_TOKENS]
    samples = {n: args.samples if n <= window else args.samples_beyond for n in lengths}
    prompts = make_prompts(tokenizer, text, samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tuned, before = tuned.to(device), before.to(device)
    few = {n: min(count, args.samples_before) for n, count in samples.items()}
    recalls = {
        "recall_tuned": Recall(tuned, True, samples),
        "recall_zero_shot_yarn": Recall(before, True, few),
        "recall_before_long_stage_plain_rope": Recall(before, False, {n: few[n] for n in lengths if n <= window}),
    }
    bits = partial(measure_bpb, tokenizer=tokenizer, text=text)
    bpb: dict[str, float] = {}
    steps: list[tuple[str, Callable[[], float]]] = [
        (f"tuned_window_{window}", lambda: bits(tuned, window_tokens=window, yarn=True, rows=4)),
        (f"tuned_window_{4 * window}", lambda: bits(tuned, window_tokens=4 * window, yarn=True, rows=1)),
        (
            f"before_long_stage_window_{window}_plain_rope",
            lambda: bits(before, window_tokens=window, yarn=False, rows=4),
        ),
    ]
    for name, step in steps:
        bpb[name] = step()
        report.add(bpb=bpb)
        print(name, bpb[name], flush=True)
    xz = xz_bits_per_byte(text)
    report.add(xz_9e_bpb=xz, bpb_over_xz=bpb[f"tuned_window_{window}"] / xz, held_out_bytes=len(text.encode()))
    ask_in_rounds(recalls, prompts, report)


def ask_in_rounds(recalls: dict[str, Recall], prompts: Prompts, report: Report) -> None:
    while left := [(name, length) for name, recall in recalls.items() for length in recall.unfinished()]:
        for name, length in left:
            if report.time_is_up:
                print("time is up", left, flush=True)
                return
            recalls[name].ask_more(prompts, length)
            report.add(**{name: recalls[name].figures()})
        for name, recall in recalls.items():
            counts = {n: f"{sum(right)}/{recall.asked[n] * len(DEPTHS)}" for n, right in recall.right.items()}
            print(name, counts, flush=True)


def training_summary(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "text_loss" in line]
    return {
        "stop": next(line for line in reversed(lines) if line.get("event") == "stop"),
        "stages": [line for line in lines if line.get("event") == "stage"],
        "evals": [line for line in lines if line.get("event") == "eval"],
        "last_step": steps[-1],
        "median_tokens_per_s": float(np.median([line["tokens_per_s"] for line in steps])),
    }


def machine() -> dict[str, str]:
    return {
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers_version,
        "arithmetic": "float32 on the published bfloat16 weights",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a trained run and write its result file.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=34, help="prompts of each depth, up to the training window")
    parser.add_argument("--samples-beyond", type=int, default=12, help="the same, beyond the training window")
    parser.add_argument("--samples-before", type=int, default=4, help="the same, for the network before the long stage")
    parser.add_argument("--limit", type=float, default=float("inf"), help="ask no more after this many seconds")
    args = parser.parse_args()
    args.result.parent.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = Report(
        args.result, {"date": today, "machine": machine(), "training": training_summary(args.run)}, args.limit
    )
    measure(args.run, (args.data / "held_out.txt").read_text(), report, args)
    # Asked last: naming the GPU starts its driver, and the processes that make prompts are forked before that.
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    report.add(machine={"gpu": gpu, **machine()})


if __name__ == "__main__":
    main()
