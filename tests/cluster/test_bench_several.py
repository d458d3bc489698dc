"""The benches of several devices, at tiny sizes on CPUs: every part of them runs, and their results are whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def results_of(folder: Path, bench: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "bench", bench, "--device", "cpu", "--shape", "tiny"]
    done = subprocess.run(
        [*command, *options, "--out", str(folder)], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("cpu-*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"][bench]
    return found


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_ring_of_two_is_compared_in_three_ways_and_with_its_exchanges_left_out(tmp_path: Path) -> None:
    found = results_of(tmp_path, "ring", "--tokens", "256", "--heads", "4", "8", "--rounds", "1", "--exchange")

    assert [one["heads"] for one in found["lengths"]] == [4, 8]
    assert found["lengths"][0]["expanded_over_latent_bytes"] == 4 * (24 + 16) / 40
    for one in found["lengths"]:
        assert {"latent_efficiency", "expanded_efficiency", "heads_efficiency"} <= one.keys()
        assert {name: len(part["with_exchange_ms"]) for name, part in one["exchange"].items()} == {
            "latent": 1,
            "expanded": 1,
        }


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_split_cluster_is_compared_with_two_mixed_nodes(tmp_path: Path) -> None:
    options = (
        "--prompt 256 --pairs 2 --batch 2 --context 128 --running-tokens 3000 --long-prompt 1024 --alone-s 0.3 "
        "--rounds 1 --chunk-tokens 512 --mixed-chunk-tokens 128 --pool-mib 64"
    )
    found = results_of(tmp_path, "split", *options.split())

    assert found["handoff"][0]["equal_answers"] == 2  # fp32: the same tokens through the cluster and on one node
    (between,) = found["between_tokens"]
    assert between["medians"].keys() == {"split", "chunked", "unchunked"}
    assert between["medians"]["chunked"]["gaps"] == 2 * (8 + 1)
