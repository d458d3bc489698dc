"""Choosing tokens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.core.types import SampledToken, Sampling
from kvrelay.model.sampler import NonFiniteLogitsError, SamplerState, sample, uniform

HOT = Sampling(max_tokens=100, temperature=1.0, seed=7)
LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -1.0]])


def _draw(sampling: Sampling, *, count: int = 4000, logits: torch.Tensor = LOGITS) -> Counter[int]:
    state = SamplerState(sampling, [])
    rows = sample(logits.expand(count, -1), [state] * count, list(range(count)))
    return Counter(row.token_id for row in rows if isinstance(row, SampledToken))


def _one(sampling: Sampling, *, prompt: list[int], num_sent: int = 0, logits: torch.Tensor = LOGITS) -> SampledToken:
    (row,) = sample(logits, [SamplerState(sampling, prompt, num_sent)], [len(prompt)])
    assert isinstance(row, SampledToken)
    return row


def test_frequencies_follow_the_distribution() -> None:
    counts = _draw(HOT)
    expected = torch.softmax(LOGITS[0].double(), dim=-1).numpy() * 4000

    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in range(6))

    assert chi_square < 20.5  # 99.9% point for 5 degrees of freedom


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 1, "top_p": 0.1}, {0}),
        ({"temperature": 1e-3}, {0}),
    ],
)
def test_filters_keep_exactly_these_tokens(change: dict[str, float], kept: set[int]) -> None:
    assert set(_draw(replace(HOT, **change))) == kept  # type: ignore[arg-type]


def test_equal_probabilities_are_ordered_by_token_id() -> None:
    logits = torch.zeros(1, 4)

    assert set(_draw(replace(HOT, top_k=2), logits=logits)) == {0, 1}
    assert _one(Sampling(max_tokens=1), prompt=[1], logits=logits).token_id == 0


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    states = [SamplerState(replace(HOT, seed=seed, top_p=0.9), [1, 2, 3]) for seed in range(5)]
    positions = [3, 9, 27, 81, 243]

    together = sample(logits, states, positions)
    alone = [sample(logits[i : i + 1], [states[i]], [positions[i]])[0] for i in range(5)]

    assert together == alone


def test_u_depends_on_seed_and_position_only() -> None:
    assert uniform(seed=1, position=2) == uniform(seed=1, position=2)
    assert len({uniform(seed=seed, position=position) for seed in range(30) for position in range(30)}) == 900
    assert 0 <= uniform(seed=2**64 - 1, position=2**31) < 1


def test_penalties_move_the_logits_as_defined() -> None:
    sampling = Sampling(
        max_tokens=9, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, temperature=0.0
    )
    state = SamplerState(sampling, [0, 4, 1, 1], num_sent=2)
    state.observe(3)
    raw = LOGITS[0].double().numpy()

    moved = state.penalise(raw)

    expected = raw.copy()
    expected[[0, 1]] /= 2.0
    expected[[4]] *= 2.0  # negative logits are pushed down, not up
    expected[1] -= 0.25 + 0.5 * 2
    expected[3] -= 0.25 + 0.5 * 1
    np.testing.assert_allclose(moved, expected)
    np.testing.assert_array_equal(raw, LOGITS[0].numpy())


def test_a_retry_with_sent_tokens_continues_like_the_first_try() -> None:
    sampling = replace(HOT, presence_penalty=1.5, frequency_penalty=0.5)
    first = SamplerState(sampling, [5, 2])
    for token in (1, 3, 1):
        first.observe(token)
    again = SamplerState(sampling, [5, 2, 1, 3, 1], num_sent=3)

    assert sample(LOGITS, [first], [5]) == sample(LOGITS, [again], [5])


def test_logprobs_are_of_the_raw_logits() -> None:
    token = _one(replace(HOT, logprobs=2, temperature=5.0, presence_penalty=9.0), prompt=[0])
    expected = torch.log_softmax(LOGITS[0].double(), dim=-1)

    assert token.logprob is not None
    assert math.isclose(token.logprob.logprob, float(expected[token.token_id]), abs_tol=1e-12)
    assert [index for index, _ in token.logprob.top] == [0, 1]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.stack([LOGITS[0], torch.full((6,), math.nan), torch.full((6,), -math.inf)])
    states = [SamplerState(HOT, []) for _ in range(3)]

    good, nan, empty = sample(logits, states, [0, 0, 0])

    assert isinstance(good, SampledToken)
    assert isinstance(nan, NonFiniteLogitsError)
    assert isinstance(empty, NonFiniteLogitsError)


EXTREMES = (5e-324, 1e-300, 1.0, 100.0)


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 3}, {"top_p": 5e-324}])
@pytest.mark.parametrize("temperature", EXTREMES)
@pytest.mark.parametrize("repetition", EXTREMES)
@pytest.mark.parametrize("presence", [-100.0, 0.0, 100.0])
def test_every_setting_within_the_limits_chooses_a_token(
    filters: dict[str, float], temperature: float, repetition: float, presence: float
) -> None:
    """One that raised would end the step thread, and with it the node of everybody."""
    sampling = replace(
        HOT,
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        **filters,  # type: ignore[arg-type]
    )

    assert 0 <= _one(sampling, prompt=[0, 1, 4, 5], num_sent=2).token_id < 6


ANY = st.floats(width=64)


@given(ANY, ANY, ANY, ANY, ANY, ANY, st.sampled_from([0, 1, 3, 2**32 - 1]), st.sampled_from([0, 2**64 - 1]))
@example(1.0, 1.0, 2.0, 1.0, 0.0, 0.0, 0, 0)
@example(math.nan, 1.0, 0.0, 1.0, 0.0, 0.0, 3, 0)
def test_no_setting_at_all_makes_the_sampler_raise(
    temperature: float, top_p: float, min_p: float, repetition: float, presence: float, frequency: float, top_k: int,
    seed: int,
) -> None:  # fmt: skip
    """The limits are the router's; a node that is called by somebody else must not end by a number."""
    sampling = Sampling(
        max_tokens=9, temperature=temperature, top_p=top_p, min_p=min_p, repetition_penalty=repetition,
        presence_penalty=presence, frequency_penalty=frequency, top_k=top_k, seed=seed, logprobs=2,
    )  # fmt: skip

    assert 0 <= _one(sampling, prompt=[0, 1, 4, 5], num_sent=2).token_id < 6


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.9}])
def test_the_smallest_temperature_is_greedy(filters: dict[str, float]) -> None:
    assert set(_draw(replace(HOT, temperature=5e-324, **filters), count=50)) == {0}  # type: ignore[arg-type]


def test_minus_infinity_is_never_chosen() -> None:
    logits = LOGITS.clone()
    logits[0, 0] = -math.inf

    assert 0 not in _draw(HOT, logits=logits)


@given(
    levels=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    top_k=st.integers(1, 45),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    num_top=st.integers(0, 45),
)
@settings(deadline=None)
def test_ties_at_the_edge_of_a_filter_are_kept_by_lowest_id(
    levels: list[int], top_k: int, min_p: float, num_top: int
) -> None:
    logits = torch.tensor([levels], dtype=torch.float32)
    by_rank = sorted(range(len(levels)), key=lambda token: (-levels[token], token))
    likely = [token for token in by_rank if math.exp(levels[token] - max(levels)) >= min_p]

    sampling = replace(HOT, top_k=top_k, min_p=min_p, logprobs=num_top)
    rows = [_one(replace(sampling, seed=seed), prompt=[], logits=logits) for seed in range(20)]

    for row in rows:
        assert row.token_id in likely[:top_k]
        assert row.logprob is not None
        assert [token for token, _ in row.logprob.top] == by_rank[:num_top]


def test_the_token_of_each_u_is_that_of_a_full_sort() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 5000)).round(1).astype(np.float32))  # many ties
    weights = np.exp(logits[0].double().numpy() - float(logits.max()))
    order = np.argsort(-weights, kind="stable")[:50]
    cdf = np.cumsum(weights[order])

    for seed in range(200):
        wanted = order[np.searchsorted(cdf, uniform(seed=seed, position=0) * cdf[-1], side="right")]
        assert _one(replace(HOT, top_k=50, seed=seed), prompt=[], logits=logits).token_id == wanted
