"""`kvrelay eval` gives the same tokens and probabilities through a cluster as in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.cluster import Cluster
from cluster.specs import EMBEDDED
from kvrelay.cli.manual import python_manual

SPEC = EMBEDDED
GRID = ("--lengths", "256,700", "--depths", "0.2,1", "--samples", "1", "--json")


def evaluate(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "eval", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of one process."""
    file = tmp_path_factory.mktemp("recall") / "alone.json"
    assert result_of(evaluate("recall", "--out", str(file), *GRID)) == json.loads(file.read_text())
    return file


def test_recall_through_a_cluster_gives_the_tokens_of_one_process(cluster: Cluster, alone: Path) -> None:
    done = evaluate("recall", "--endpoint", cluster.endpoint, "--repeat", "2", "--compare", str(alone), *GRID)

    result = result_of(done)
    assert result["differing_from_earlier"] == 0
    assert result["tokens_digest"] == json.loads(alone.read_text())["tokens_digest"]
    first, second = result["passes"]
    assert second["differing_from_first"] == 0
    assert second["cached_tokens"] > 0.8 * second["prompt_tokens"] > first["cached_tokens"]
    # The ring of one may have been drained by another module that shares this cluster.
    assert 2 in [node["ring_size"] for node in result["target"]["nodes"] if node["role"] == "prefill"]


def test_other_tokens_than_before_are_exit_code_1(cluster: Cluster, alone: Path, tmp_path: Path) -> None:
    changed = json.loads(alone.read_text())
    changed["prompts"][3]["token_ids"][0] += 1
    (tmp_path / "changed.json").write_text(json.dumps(changed))

    done = evaluate("recall", "--endpoint", cluster.endpoint, "--compare", str(tmp_path / "changed.json"), *GRID)

    assert done.returncode == 1
    assert json.loads(done.stdout)["differing_from_earlier"] == 1
    assert "1 prompts with other tokens" in done.stderr


def test_bits_per_byte_through_a_cluster_are_those_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(python_manual()[100_000:104_000])
    args = ("bpb", "--text", str(tmp_path / "text.txt"), "--window-tokens", "512", "--json")

    split, alone = result_of(evaluate(*args, "--endpoint", cluster.endpoint)), result_of(evaluate(*args))

    assert split["bpb"] == pytest.approx(alone["bpb"], abs=1e-6)
    assert split["scored_tokens"] == alone["scored_tokens"] > 512
    assert split["ratio"] == pytest.approx(split["bpb"] / split["xz_9e_bpb"])
    assert {"date", "machine", "versions", "target"} <= split.keys()


def test_nobody_listening_is_one_line_and_exit_code_1() -> None:
    done = evaluate("recall", "--endpoint", "127.0.0.1:1", *GRID)

    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "UNAVAILABLE" in done.stderr
