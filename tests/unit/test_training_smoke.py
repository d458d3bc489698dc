"""The training script's CPU mode: it learns, and the same command resumes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "model" / "training" / "train.py"


def lines(out: Path, *arguments: str) -> list[dict[str, object]]:
    subprocess.run([sys.executable, str(SCRIPT), "--smoke", "--out", str(out), *arguments], check=True, timeout=300)
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_loss_falls_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    first = lines(tmp_path, "--stop-after", "5")
    stopped_at = first[-1]["step"]
    assert first[-1]["event"] == "stop"

    both = lines(tmp_path)
    assert {"event": "resume", "step": stopped_at} == {k: both[len(first)][k] for k in ("event", "step")}
    losses = [float(str(line["text_loss"])) for line in both if "text_loss" in line]
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "model" / "model.safetensors").exists()
