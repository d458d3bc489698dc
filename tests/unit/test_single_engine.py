"""The one-process engine: limits, memory, and the price of a batch."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvrelay.core.errors import CapacityError, InvalidRequestError
from kvrelay.core.types import Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.config import MoeConfig, Routing
from kvrelay.model.moe import GatedMlp, Moe, Router
from kvrelay.model.prefill_step import warm_up
from kvrelay.model.single import SingleEngine
from kvrelay.model.transformer import Model
from oracle_data import oracle_folder, recording

CPU = torch.device("cpu")


def a_model(name: str = "v3_noaux") -> Model:
    return load_model(oracle_folder(name), dtype="float32", device=CPU, max_model_len=2048)


def an_engine(model: Model, num_pages: int) -> SingleEngine:
    return SingleEngine(model, LatentPool(model.layout(block_tokens=64), num_pages, CPU))


@pytest.mark.parametrize(
    ("ids", "max_tokens", "named"),
    [([], 1, "empty"), ([3, 320], 1, "token 320"), ([-1], 1, "token -1"), ([5] * 2000, 49, "2048")],
)
def test_a_request_that_nobody_can_serve_is_refused(ids: list[int], max_tokens: int, named: str) -> None:
    engine = an_engine(a_model(), 40)

    with pytest.raises(InvalidRequestError, match=named):
        next(engine.generate(ids, Sampling(max_tokens=max_tokens)))


def test_pages_come_back_when_a_request_ends_or_is_dropped() -> None:
    engine = an_engine(a_model(), 2)
    for _ in range(3):
        assert len(list(engine.generate([1, 2, 3], Sampling(max_tokens=70)))) == 70
        dropped = engine.generate([1, 2, 3], Sampling(max_tokens=70))
        next(dropped)
        dropped.close()

    with pytest.raises(CapacityError, match="3"):
        engine.open(129)


def test_generation_ends_with_the_stop_token() -> None:
    expected = recording("v3_noaux", 64)
    stop = expected.greedy[5]
    sampling = Sampling(max_tokens=24, stop_token_ids=(stop,))

    tokens = [token.token_id for token in an_engine(a_model(), 3).generate(expected.prompt, sampling)]

    assert tokens == expected.greedy[: expected.greedy.index(stop) + 1]


@pytest.mark.parametrize("chunk_tokens", [None, 13])
def test_a_seed_names_one_text_whatever_the_chunks(chunk_tokens: int | None) -> None:
    prompt = recording("v3_noaux", 64).prompt
    sampling = Sampling(max_tokens=40, temperature=1.5, top_p=0.95, seed=11, presence_penalty=0.5)
    engine = an_engine(a_model(), 3)

    whole = list(engine.generate(prompt, sampling))

    assert list(engine.generate(prompt, sampling, chunk_tokens=chunk_tokens)) == whole
    assert len({token.token_id for token in whole}) > 5


def decode_time_s(engine: SingleEngine, prompt: list[int], batch: int) -> float:
    """Return the median time of a decode step of `batch` sequences of equal length."""
    sessions = [engine.open(len(prompt) + 30) for _ in range(batch)]
    for session in sessions:
        engine.prefill(session, prompt)
    times = []
    for _ in range(25):
        started = time.thread_time()  # not what others on this machine take
        engine.decode_step(sessions, [7] * batch)
        times.append(time.thread_time() - started)
    for session in sessions:
        engine.close(session)
    return statistics.median(times)


@pytest.mark.parametrize("name", ["v3_noaux", "v3_dense"])
def test_a_batch_of_eight_costs_at_most_three_times_one(name: str) -> None:
    engine, prompt = an_engine(a_model(name), 8 * 24 + 1), recording(name, 1500).prompt
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other work on the machine would otherwise stall a step at each barrier
    try:
        ratios = [decode_time_s(engine, prompt, 8) / decode_time_s(engine, prompt, 1) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)

    assert min(ratios) <= 3.0


def a_long_checkpoint(tmp_path: Path) -> Path:
    """Return a tiny dense checkpoint whose config allows 65,536 tokens."""
    folder = tmp_path / "long"
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(oracle_folder("v3_dense") / name, folder / name)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LONG_PREFILL = """
import resource, sys, torch
from pathlib import Path
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.single import SingleEngine
model = load_model(Path(sys.argv[1]), dtype="float32", device=torch.device("cpu"))
engine = SingleEngine(model, LatentPool(model.layout(block_tokens=64), 1024, model.device))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ids = torch.randint(0, 250, (int(sys.argv[2]),), generator=torch.Generator().manual_seed(1)).tolist()
logits = engine.prefill(engine.open(len(ids)), ids, chunk_tokens=int(sys.argv[3]))
assert logits.isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, int(logits.argmax()))
"""


def long_prefill(folder: Path, tokens: int, chunk_tokens: int) -> tuple[int, int]:
    """Return (KiB that the peak of memory grew by, first token) of one prefill in a process of its own."""
    command = [sys.executable, "-c", LONG_PREFILL, str(folder), str(tokens), str(chunk_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown_kib, token = done.stdout.split()
    return int(grown_kib), int(token)


def test_memory_of_a_long_prompt_does_not_grow_with_its_square(tmp_path: Path) -> None:
    folder = a_long_checkpoint(tmp_path)

    chunked_kib, chunked_token = long_prefill(folder, 8192, 1024)
    whole_kib, whole_token = long_prefill(folder, 8192, 8192)

    assert chunked_token == whole_token
    assert chunked_kib < 150 << 10
    assert whole_kib < 400 << 10  # one layer's scores alone would be 1 GiB


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sixty_four_thousand_tokens_fit_in_little_memory(tmp_path: Path) -> None:
    grown_kib, _ = long_prefill(a_long_checkpoint(tmp_path), 65536, 8192)

    assert grown_kib < 600 << 10


@pytest.mark.parametrize("routing", list(Routing))
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_experts_equal_a_loop_over_tokens(routing: Routing, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    config = MoeConfig(
        routing=routing, num_experts=8, experts_per_token=3, num_groups=4, groups_per_token=2, expert_width=5,
        shared_width=0, weight_scale=1.5, normalise_weights=routing is Routing.SIGMOID_NOAUX, first_moe_layer=0,
    )  # fmt: skip
    gate_up, down = torch.randn(8, 10, 6, generator=generator), torch.randn(8, 6, 5, generator=generator)
    router = Router(config, torch.randn(8, 6, generator=generator), torch.randn(8, generator=generator))
    x = torch.randn(num_tokens, 6, generator=generator)

    out = Moe(router, gate_up, down, None)(x)

    weights, experts = router(x)
    for token in range(num_tokens):
        parts = [
            weight
            * F.linear(
                F.silu(F.linear(x[token], gate_up[expert, :5])) * F.linear(x[token], gate_up[expert, 5:]), down[expert]
            )
            for weight, expert in zip(weights[token], experts[token].tolist(), strict=True)
        ]
        torch.testing.assert_close(out[token], torch.stack(parts).sum(0), atol=1e-4, rtol=1e-5)
        assert len(set(experts[token].tolist())) == 3


def test_negative_biased_scores_cannot_bring_in_a_masked_group() -> None:
    config = MoeConfig(
        routing=Routing.SIGMOID_NOAUX, num_experts=4, experts_per_token=2, num_groups=2, groups_per_token=1,
        expert_width=1, shared_width=0, weight_scale=1.0, normalise_weights=True, first_moe_layer=0,
    )  # fmt: skip
    router = Router(config, torch.zeros(4, 1), torch.tensor([-3.0, -4.0, -5.0, -6.0]))

    _, experts = router(torch.ones(1, 1))

    assert sorted(experts[0].tolist()) == [0, 1]


def test_shared_experts_see_every_token_unweighted() -> None:
    config = MoeConfig(
        routing=Routing.SOFTMAX_GREEDY, num_experts=2, experts_per_token=1, num_groups=1, groups_per_token=1,
        expert_width=1, shared_width=2, weight_scale=1.0, normalise_weights=False, first_moe_layer=0,
    )  # fmt: skip
    shared = GatedMlp(torch.randn(4, 3), torch.randn(3, 2))
    x = torch.randn(6, 3)

    out = Moe(Router(config, torch.randn(2, 3), None), torch.zeros(2, 2, 3), torch.zeros(2, 3, 1), shared)(x)

    torch.testing.assert_close(out, shared(x))


def test_a_warm_up_uses_one_layer_of_each_kind() -> None:
    model = a_model()
    finished: list[int] = []

    class Watched:
        def __init__(self, number: int) -> None:
            self._number = number

        def __getattr__(self, name: str) -> object:
            if name == "finish":
                finished.append(self._number)
            return getattr(model.layers[self._number], name)

    watched: Any = [Watched(number) for number in range(len(model.layers))]
    warm_up(dataclasses.replace(model, layers=tuple(watched)))

    assert sorted(model.config.is_moe_layer(number) for number in finished) == [False, True]
