"""What work costs, and how observations correct it."""

from __future__ import annotations

import pytest

from kvrelay.router.cost import Correction, NodeCost, compute_s, relay_s

COST = NodeCost(token_s=1e-5, pair_s=4e-10)


def alone(tokens: int, cached: int = 0) -> float:
    return compute_s(COST, tokens=tokens, cached=cached, ring_size=1, break_even_tokens=1024)


def test_attention_makes_prefill_quadratic_and_a_cached_prefix_is_attended_not_computed() -> None:
    assert alone(128_000) > 4 * alone(32_000)
    assert alone(1000) < alone(1000, cached=100_000) < alone(101_000)


@pytest.mark.parametrize("ring_size", [2, 3, 8])
def test_a_ring_pays_from_its_break_even_length_on(ring_size: int) -> None:
    def ring(tokens: int) -> float:
        return compute_s(COST, tokens=tokens, cached=0, ring_size=ring_size, break_even_tokens=4096)

    assert ring(4095) > alone(4095)
    assert ring(4096) == pytest.approx(alone(4096))
    assert ring(4097) < alone(4097)
    assert ring(1_000_000) == pytest.approx(alone(1_000_000) / ring_size, rel=0.05)


def test_nothing_to_relay_costs_nothing() -> None:
    cost = NodeCost(relay_start_s=1.0)

    assert relay_s(cost, tokens=0, ring_size=1) == 0.0
    assert relay_s(cost, tokens=1, ring_size=1) > 1.0


def test_a_correction_finds_the_true_speed_and_shrugs_off_outliers() -> None:
    correction = Correction()
    for at in range(60):
        correction.observe(predicted_s=1.0, observed_s=90.0 if at % 10 == 9 else 3.0)

    assert correction.scale == pytest.approx(3.0, rel=0.35)


def test_a_correction_is_bounded_and_ignores_nonsense() -> None:
    correction = Correction()
    for observed_s in (1e9, 0.0, -1.0, 1e9):
        correction.observe(predicted_s=1.0, observed_s=observed_s)

    assert correction.observations == 2
    assert correction.scale == pytest.approx(16.0)
