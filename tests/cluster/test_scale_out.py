"""Throughput follows the number of decode nodes, with the real engine on a device that is slowed down evenly."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cluster import vocab_size, wait_until
from kvrelay.core.errors import SettingsError
from kvrelay.core.settings import load as load_settings
from kvrelay.decode_node.settings import DecodeSettings
from operations.deployment import MODEL
from operations.load import Load
from operations.processes import Processes, processes
from oracle_data import oracle_folder

NODE = ("--fleet", "test-scale-out", "--pool-pages", "512", "--max-model-len", "1024", "--dtype", "float32")
# 4 sequences each 120 ms: 33 tokens per second and node, far less than what the cores of this machine can compute.
SLOW = ("--max-batch", "4", "--step-floor-ms", "120")
NUM_CLIENTS, MAX_TOKENS = 15, 24  # on one node a token comes every fourth step: 0.45 s, less than is promised
WINDOW_S, SPREAD_S = 20.0, 60.0
AT_LEAST = 2.2


def test_a_floor_under_steps_is_refused_outside_of_tests() -> None:
    with pytest.raises(SettingsError, match="--step-floor-ms is for tests"):
        load_settings(DecodeSettings, ["--model", "m", "--step-floor-ms", "5"], prog="decode", environ={})


@pytest.fixture
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    options = {"router": NODE[:2], "prefill": NODE, "decode": (*NODE, *SLOW)}
    with processes(oracle_folder(MODEL), tmp_path_factory.mktemp("logs"), options) as started:
        yield started


def tokens_per_s(deployment: Processes) -> float:
    """Return how many tokens all decode nodes generate in a second."""
    began_s, tokens = time.monotonic(), deployment.client.counter("tokens", role="decode")
    time.sleep(WINDOW_S)
    return (deployment.client.counter("tokens", role="decode") - tokens) / (time.monotonic() - began_s)


def wait_for_steady_load(deployment: Processes, load: Load, num_nodes: int) -> None:
    """Wait until so many nodes share the load, and all that began before is over."""
    load.wait_for(len(load.answers) + 2 * NUM_CLIENTS, SPREAD_S)

    def latest() -> Counter[str]:
        return Counter(answer.finished.nodes.decode_node for answer in load.answers[-2 * NUM_CLIENTS :])

    wait_until(lambda: len(latest()) == num_nodes, SPREAD_S, lambda: str(latest()))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_throughput_follows_the_number_of_decode_nodes(deployment: Processes) -> None:
    speeds: dict[str, float] = {}
    vocabulary = vocab_size(oracle_folder(MODEL))
    with Load(deployment.client, clients=NUM_CLIENTS, vocab_size=vocabulary, max_tokens=MAX_TOKENS) as load:
        for step, count in (("one", 1), ("three", 3), ("one again", 1)):
            deployment.scale("decode", count)
            wait_for_steady_load(deployment, load, count)
            speeds[step] = tokens_per_s(deployment)
    ratio = speeds["three"] / speeds["one"]
    _keep({**{f"tokens_per_s {step}": speed for step, speed in speeds.items()}, "ratio": ratio})

    assert not load.failures, load.failures[:5]
    assert ratio >= AT_LEAST, speeds
    assert speeds["one again"] == pytest.approx(speeds["one"], rel=0.25), speeds
    deployment.client.assert_settled(30)


def _keep(figures: dict[str, float]) -> None:
    """Print the figures, and write them to the file that SCALE_OUT names."""
    text = json.dumps({name: round(value, 2) for name, value in figures.items()})
    sys.stdout.write(text + "\n")
    if target := os.environ.get("SCALE_OUT"):
        Path(target).write_text(text + "\n")
