"""What the benches of a device hold measurements against: floors and predictions."""

from __future__ import annotations

import argparse
import json
import threading

import pytest
import torch

from kvrelay.bench import chunks, device_rates, giving_way, memory, step_transformers
from kvrelay.bench.random_model import TINY, V2_LITE, random_model
from kvrelay.core.errors import TransferError
from kvrelay.core.layout import PageLayout
from kvrelay.model.tensors import expected_tensors
from repo import ROOT


def test_a_step_reads_the_known_bytes_of_a_context() -> None:
    assert device_rates.step_cache_bytes(V2_LITE, lengths=[1000, 1], number_bytes=2) == 1001 * 31_104


def test_a_larger_batch_reads_more_experts_unless_all_tokens_share_them() -> None:
    def weights(batch: int, *, same: bool) -> float:
        return device_rates.step_weight_bytes(V2_LITE, batch=batch, number_bytes=2, same_experts=same)

    assert weights(1, same=False) == weights(1, same=True)
    assert weights(32, same=True) == pytest.approx(weights(1, same=True), rel=1e-3)
    assert weights(32, same=False) > 6 * weights(1, same=False)


def test_a_prefill_counts_half_of_the_square_of_its_length() -> None:
    products, attention = device_rates.prefill_flop(V2_LITE, 32_768)

    assert attention == 27 * 16 * 320 * 32_768**2
    assert 2 * device_rates.prefill_flop(V2_LITE, 16_384)[0] == products


def test_the_predicted_memory_of_a_million_tokens_is_within_a_twentieth_of_the_recorded_one() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "h200-2026-11-29.json").read_text())["results"]["memory"]
    layout = PageLayout(num_layers=27, latent_width=512, rope_width=64, dtype="bfloat16", model_id="-")
    pool_bytes = layout.pages_for(recorded["prompt_tokens"]) * layout.page_bytes_all_layers

    predicted = memory.predict(V2_LITE, pool_bytes=pool_bytes, chunk_tokens=recorded["chunk_tokens"], number_bytes=2)

    assert predicted.total / 2**30 == pytest.approx(recorded["measured_gib"], rel=0.05)


def test_a_paused_chunk_keeps_its_hidden_states_and_rope_tables() -> None:
    none, two = (
        memory.predict(V2_LITE, pool_bytes=0, chunk_tokens=1000, number_bytes=2, paused_chunks=paused)
        for paused in (0, 2)
    )
    assert two.temporaries - none.temporaries == 2 * 1000 * (2048 * 2 + 2 * 64 * 4)


def test_routers_of_zeros_send_all_tokens_to_the_same_experts() -> None:
    model = random_model(TINY, torch.device("cpu"), torch.float32, same_experts=True)

    _, experts = model.layers[1]._feed_forward.router(torch.randn(5, TINY.hidden_size))  # type: ignore[attr-defined]

    assert (experts.sort().values == experts[0].sort().values).all()


def test_dummy_weights_are_small_and_even_norms_are_random() -> None:
    model = random_model(TINY, torch.device("cpu"), torch.float32, dummy=True)

    for weight in (model.embedding_VD, model.final_norm_D):
        assert 0.5e-3 < weight.abs().max() <= 1e-3
        assert weight.min() < 0 < weight.max()


def test_a_rate_is_also_measured_after_some_time() -> None:
    rates = device_rates.measure(torch.device("cpu"), torch.float32)

    assert 0 < rates.sustained_flop_per_s < 10 * rates.matmul_flop_per_s


def test_transformers_makes_a_model_of_our_shape_and_is_timed_beside_ours() -> None:
    pytest.importorskip("transformers")
    theirs = step_transformers.measure(TINY, torch.device("cpu"), prompt_tokens=8, steps=2, runs=1)
    decode = [{"batch": 1, "context": 8, "same_experts": False, "step_ms": theirs["step_ms"] / 2}]
    prefill = [{"prompt_tokens": 8, "same_experts": False, "ttft_ms": theirs["ttft_ms"]}]

    found = step_transformers.beside(theirs, {"decode": decode, "prefill": prefill})

    assert found["our_step_over_theirs"] == pytest.approx(0.5, rel=1e-3)
    assert found["our_ttft_over_theirs"] == 1.0


def test_their_configuration_has_as_many_weights_as_ours() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV2Config(**step_transformers.their_config(TINY))

    model = transformers.AutoModelForCausalLM.from_config(config)

    ours = sum(torch.Size(shape).numel() for shape in expected_tensors(TINY).values())
    assert sum(parameter.numel() for parameter in model.parameters()) == ours


def test_a_node_takes_its_chunks_apart_and_finds_the_same_tokens() -> None:
    options = argparse.Namespace(shape="tiny", prompt=[200], chunk_tokens=64, rounds=1)

    (figures,) = chunks.measure(options, torch.device("cpu"))["prompts"]

    assert figures["same_tokens"]
    assert list(figures["ways"]) == ["bare", "worker", "sums", "relay"]
    assert all(way["host_ms"] > 0 for way in figures["ways"].values())


def test_a_short_prompt_that_chunks_give_way_to_changes_no_token() -> None:
    options = argparse.Namespace(
        shape="tiny", prompt=6000, short=60, at=(0.1, 0.3), chunk_tokens=[6000], give_way_ms=1, rounds=2
    )

    (figures,) = giving_way.measure(options, torch.device("cpu"))["chunks"]

    assert figures["same_tokens"]
    assert figures["ways"]["goes_on"]["pauses"] == 0 < figures["ways"]["gives_way"]["pauses"]


def test_a_part_of_the_long_prompts_time_has_the_median_of_all_rounds() -> None:
    alone = giving_way.Asked(0.0, threading.Event(), ttft_s=0.1)
    found = [{"at": at, "short_s": s, "long_s": 1.0} for at, s in ((0.2, 0.1), (0.5, 0.7), (0.2, 0.2), (0.2, 0.3))]

    assert giving_way._figures(found, alone, alone)["short_ms"] == {"0.2": 200.0, "0.5": 700.0}


def test_what_leaves_beside_the_chunks_is_every_row_of_every_layer() -> None:
    options = argparse.Namespace(shape="tiny", prompt=[200], chunk_tokens=64)
    bench = chunks.Bench(options, torch.device("cpu"))
    try:
        bench.first_token("relay", bench.prompt(200, 0))
        for layer in range(bench._pool.layout.num_layers):
            assert bench._pool.rows(layer)[:200].any(-1).all()
        bench.check_relayed(200)
        bench._pool.rows(1)[199, 5] += 1.0
        with pytest.raises(TransferError, match="holds other rows"):
            bench.check_relayed(200)
    finally:
        bench.close()
