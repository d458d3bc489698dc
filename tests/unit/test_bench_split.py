"""The parts of `bench split` and `bench ring`: gaps, exposed exchanges, the random checkpoint, mixed nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.bench import (
    exposed,
    gaps,
    mixed_node,
    order_process,
    random_checkpoint,
    ring_exchange,
    ring_picture,
    split_client,
)
from kvrelay.bench.random_model import TINY, V2_LITE
from kvrelay.bench.timed import Timed
from kvrelay.core.clock import ManualClock
from kvrelay.core.errors import InvalidRequestError, UnavailableError
from kvrelay.core.settings import load
from kvrelay.core.types import Sampling
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.config import ModelConfig, load_config
from kvrelay.model.single import SingleEngine
from kvrelay.router.timesplit import RequestTimer

CPU = torch.device("cpu")


def kernel(kind: str, at_ms: float, ms: float) -> dict[str, object]:
    return {"stream": 7, "kind": kind, "at_ms": at_ms, "ms": ms}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("random")
    random_checkpoint.write(made, TINY, device=CPU)
    return made


@pytest.fixture(scope="module")
def node(folder: Path) -> mixed_node.MixedNode:
    return mixed_node.MixedNode(load(DecodeSettings, options_of(folder), prog="test"), block_tokens=128)


def options_of(folder: Path) -> list[str]:
    return ["--model", str(folder), "--device", "cpu", "--pool-pages", "64", "--max-batch", "4"]


def a_prompt(tokens: int, seed: int) -> mixed_node.Ids:
    return np.random.default_rng(seed).integers(TINY.vocab_size, size=tokens, dtype=np.int64)


def test_the_parts_of_the_exposed_time_are_all_of_it() -> None:
    clock = ManualClock()
    timer = RequestTimer(clock)
    timer.tokenize_ms = 1.0
    for step_s, mark in ((0.002, timer.attempt_begins), (0.003, timer.placed), (0.001, timer.reserved)):
        clock.advance(step_s)
        mark()
    timer.prefill_ms, timer.compute_ms = 90.0, 88.0
    timer.exposed_relay_ms, timer.verify_ms, timer.admit_ms, timer.decode_step_ms = 0.5, 0.25, 0.125, 2.5
    clock.advance(0.092)
    timer.tokens_left(1)
    clock.advance(0.005)
    timer.tokens_left(1)

    parts = exposed.parts_ms(Timed((1, 2), (0.1, 0.1055)), Timed((1, 2), (0.085, 0.0872)), asdict(timer.split()))

    assert sum(parts.values()) == pytest.approx(105.5 - 87.2)
    assert parts["prefill_compute"] == pytest.approx(3.0)
    assert parts["decode_step"] == pytest.approx(0.3)
    assert exposed.medians_ms([parts, parts]) == {name: round(ms, 3) for name, ms in parts.items()}


def obedient(name: str) -> order_process.Obey:
    def obey(order: int) -> str:
        if order < 0:
            raise InvalidRequestError(f"{order} is too little")
        if order > 9:
            raise SystemExit(1)
        return name * order

    return obey


def test_processes_obey_in_turn_say_what_failed_and_are_missed_when_they_have_ended() -> None:
    with order_process.started(obedient, [("a",), ("b",)]) as (one, other):
        assert (one.receive(), other.receive()) == (True, True)
        one.begin(2)
        assert other.ask(3) == "bbb"
        assert one.receive() == "aa"
        with pytest.raises(UnavailableError, match="-1 is too little"):
            one.ask(-1)
        assert one.ask(1) == "a"
        with pytest.raises(UnavailableError, match="has ended"):
            other.ask(10)


def test_the_client_of_a_split_cluster_has_no_torch_in_its_process() -> None:
    look = "import sys, kvrelay.bench.split_client, kvrelay.bench.order_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def test_what_is_exposed_is_said_beside_the_node_in_its_process_and_beside_it_served() -> None:
    router = dict.fromkeys(asdict(RequestTimer(ManualClock()).split()), 0.0)
    ours, one, served = Timed((1, 2), (0.095, 0.106)), Timed((1, 2), (0.1, 0.102)), Timed((1, 2), (0.08, 0.104))
    other = Timed((1, 3), (0.08, 0.104))

    found = exposed.figures([exposed.Round(ours, one, served, router), exposed.Round(ours, one, other, router)])

    assert found["exposed_over_ttft"] == pytest.approx(0.004 / 0.1)
    assert found["exposed_over_ttft_beside_served"] == pytest.approx(0.002 / 0.08)
    assert found["second_token"]["baseline_median_ms"] == 102
    assert found["second_token_beside_served"]["baseline_median_ms"] == 104
    assert found["rounds_ms"][0] == [95, 106, 100, 102, 80, 104]
    assert found["equal_answers"] == 1


@pytest.mark.parametrize("shape", [TINY, V2_LITE])
def test_a_random_checkpoint_says_the_shape_it_has(tmp_path: Path, shape: ModelConfig) -> None:
    (tmp_path / "config.json").write_text(json.dumps(random_checkpoint.config_json(shape)))

    read = load_config(tmp_path)

    assert read == replace(shape, max_model_len=shape.max_position_embeddings)


def test_a_mixed_node_answers_as_one_process_does(folder: Path, node: mixed_node.MixedNode) -> None:
    model = load_model(folder, dtype="auto", device=CPU)
    engine = SingleEngine(model, LatentPool(model.layout(block_tokens=64), 16, CPU))
    prompt = a_prompt(300, 1)

    timed = node.answer(mixed_node.Answer(prompt, 5))

    expected = [one.token_id for one in engine.generate(prompt.tolist(), Sampling(max_tokens=5), chunk_tokens=128)]
    assert list(timed.token_ids) == expected
    assert list(timed.at_s) == sorted(timed.at_s)


@pytest.mark.timeout(120)
def test_a_mixed_node_answers_the_same_when_it_is_served(folder: Path, node: mixed_node.MixedNode) -> None:
    settings = load(DecodeSettings, [*options_of(folder), "--threads", "1"], prog="test")
    prompt = a_prompt(300, 5)
    expected = node.answer(mixed_node.Answer(prompt, 3)).token_ids

    with order_process.started(mixed_node.serve, [(settings, 128)]) as (remote,):
        remote.receive()
        ask_as_client = split_client.serve(remote.ask(mixed_node.Serve()))
        remote.begin(mixed_node.AnswerCaller())
        at_client, _ = ask_as_client(split_client.Answer(prompt, 3))
        in_process = remote.receive()

    assert at_client.token_ids == in_process.token_ids == expected
    assert [len(one.at_s) for one in (at_client, in_process)] == [3, 3]
    assert all(there > here for there, here in zip(at_client.at_s, in_process.at_s, strict=True))


@pytest.mark.parametrize(("chunk_tokens", "gaps_beside"), [(50, 2 * 5), (None, 2 * 1)])
def test_running_requests_get_a_token_after_each_chunk_or_after_the_whole_prompt(
    node: mixed_node.MixedNode, chunk_tokens: int | None, gaps_beside: int
) -> None:
    order = mixed_node.Mix([a_prompt(70, 2), a_prompt(64, 3)], 400, [a_prompt(200, 4)] * 2, chunk_tokens, alone_s=0.05)

    seen = node.mix(order)

    assert [len(one) - 1 for one in seen.beside_s] == [gaps_beside] * 2
    assert len(seen.first_tokens_s) == 2
    assert seen.first_tokens_s == sorted(seen.first_tokens_s)
    assert seen.figures()["alone"]["gaps"] > 0


def test_a_gap_that_reaches_into_a_window_belongs_to_it() -> None:
    seen = gaps.Beside([[0.0, 0.01, 0.02]], [[0.02, 0.12, 0.13, 0.14]], [0.1])

    figures = seen.figures()

    assert figures["beside"]["max_ms"] == pytest.approx(100)
    assert figures["beside"]["max_over_alone_p50"] == pytest.approx(10)
    assert figures["alone"]["p50_ms"] == pytest.approx(10)
    assert figures["longest"][0] == {"ms": 100.0, "after_s": 0.0, "request": 0}
    assert [gap["ms"] for gap in figures["longest"]] == [100.0, 10.0, 10.0]


def test_what_no_other_kernel_covers_of_an_exchange_is_counted_once() -> None:
    kernels = [
        kernel("exchange", 0, 10), kernel("exchange", 5, 10), kernel("attention", 2, 4), kernel("other", 5, 7),
    ]  # fmt: skip

    found = ring_exchange.uncovered(kernels)

    assert found == {"exchange_ms": 15, "uncovered_ms": 5, "span_ms": 15}


def test_what_is_exposed_is_the_difference_that_an_exchange_makes() -> None:
    found = ring_exchange.exposure([1.01, 1.02, 1.03], [1.0, 1.0, 1.0], [0.1, 0.1, 0.1])

    assert found["exposed_over_layer"] == pytest.approx(0.02 / 1.02, abs=1e-4)
    assert found["exposed_over_exchange"] == pytest.approx(0.2)


def test_the_picture_of_a_layer_is_a_png(tmp_path: Path) -> None:
    found = {"kernels": [kernel("attention", 0, 3), kernel("exchange", 1, 1)]}

    ring_picture.draw(found, tmp_path / "layer.png", title="a layer")

    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
