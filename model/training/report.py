"""Measures a trained run and writes the result file.

python model/training/report.py --run OUT --data DATA --result bench/results/embedded-model-DEVICE-DATE.json
"""

import argparse
import datetime
import json
import lzma
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export import load_published
from measure import DEPTHS, measure_bpb, measure_recall
from network import Network
from shape import TINY
from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def xz_bits_per_byte(text: str) -> float:
    """Return what `xz -9e` makes of the text."""
    raw = text.encode()
    return 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw)


def recall_figures(network: Network, tokenizer: Tokenizer, text: str, *, yarn: bool, samples: int) -> dict[str, Any]:
    window = network.shape.train_window_tokens
    lengths = LENGTHS if yarn else [length for length in LENGTHS if length <= window]
    grid = measure_recall(network, tokenizer, text, lengths=lengths, samples=samples, yarn=yarn, seed=7)
    return {
        "depths": DEPTHS,
        "samples_per_cell": samples,
        "grid": grid,
        "mean": {length: sum(row) / len(row) for length, row in grid.items()},
    }


def figures(run: Path, text: str, samples: int, device: str) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(run / "model" / "tokenizer.json"))
    tuned = load_published(TINY, run / "model").to(device)
    before = load_published(TINY, run / "model-after-window").to(device)
    window = TINY.train_window_tokens
    xz = xz_bits_per_byte(text)
    bpb = {
        "tuned_window_4096": measure_bpb(tuned, tokenizer, text, window_tokens=window, yarn=True, rows=4),
        "tuned_window_16384": measure_bpb(tuned, tokenizer, text, window_tokens=4 * window, yarn=True, rows=1),
        "before_long_stage_window_4096_plain_rope": measure_bpb(
            before, tokenizer, text, window_tokens=window, yarn=False, rows=4
        ),
    }
    return {
        "bpb": bpb,
        "xz_9e_bpb": xz,
        "bpb_over_xz": bpb["tuned_window_4096"] / xz,
        "held_out_bytes": len(text.encode()),
        "recall_tuned": recall_figures(tuned, tokenizer, text, yarn=True, samples=samples),
        "recall_zero_shot_yarn": recall_figures(before, tokenizer, text, yarn=True, samples=max(1, samples // 2)),
        "recall_before_long_stage_plain_rope": recall_figures(
            before, tokenizer, text, yarn=False, samples=max(1, samples // 2)
        ),
    }


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
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
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
    parser.add_argument("--samples", type=int, default=20)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "training": training_summary(args.run),
        **figures(args.run, (args.data / "held_out.txt").read_text(), args.samples, device),
    }
    args.result.parent.mkdir(parents=True, exist_ok=True)
    args.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("bpb", "xz_9e_bpb", "bpb_over_xz")}, indent=1))
    for name in ("recall_tuned", "recall_zero_shot_yarn", "recall_before_long_stage_plain_rope"):
        print(name, {length: round(mean, 4) for length, mean in result[name]["mean"].items()})


if __name__ == "__main__":
    main()
