"""What the benches of a device hold measurements against: floors and predictions."""

from __future__ import annotations

import json

import pytest
import torch

from kvrelay.bench import device_rates, memory
from kvrelay.bench.random_model import TINY, V2_LITE, random_model
from kvrelay.core.layout import PageLayout
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


def test_routers_of_zeros_send_all_tokens_to_the_same_experts() -> None:
    model = random_model(TINY, torch.device("cpu"), torch.float32, same_experts=True)

    _, experts = model.layers[1]._feed_forward.router(torch.randn(5, TINY.hidden_size))  # type: ignore[attr-defined]

    assert (experts.sort().values == experts[0].sort().values).all()
