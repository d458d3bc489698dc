"""Choosing tokens on the device: the same answers as the sampler, row for row."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvrelay.core.types import SampledToken, Sampling
from kvrelay.model.device_sampler import CountRows, choose, settings_row
from kvrelay.model.sampler import SamplerState, sample

VOCABULARY = 300
LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -1.0]])
SETTINGS = [
    Sampling(
        max_tokens=99, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition,
        presence_penalty=repetition - 1, frequency_penalty=2 * (repetition - 1), seed=7 * top_k,
    )
    for temperature, (top_p, top_k, min_p), repetition in itertools.product(
        (0.0, 0.7, 2.0), ((1.0, 0, 0.0), (0.9, 50, 0.0), (0.5, 0, 0.05), (1.0, 5, 1.0), (0.3, 1, 0.0)), (1.0, 1.3)
    )
]  # fmt: skip


def chosen_by_both(steps: int, order_of: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens that sampler and device sampler choose over some steps; rows move half-way."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(VOCABULARY, (len(SETTINGS), 40), generator=generator).tolist()
    states = [SamplerState(one, prompt, 5) for one, prompt in zip(SETTINGS, prompts, strict=True)]
    last = [prompt[-1] for prompt in prompts]
    counts = CountRows(rows=len(states), vocabulary=VOCABULARY, device=torch.device("cpu"))
    expected, found = [], []
    for step in range(steps):
        if step == steps // 2:
            states, last = [states[row] for row in order_of], [last[row] for row in order_of]
        logits = 3 * torch.randn(len(states), VOCABULARY, generator=generator)
        logits[:, ::7] = logits[:, :1]  # equal ones are ordered by token id
        rows = torch.tensor([settings_row(state, 40 + step) for state in states], dtype=torch.float64)
        found += choose(logits, rows, counts.update(states, last)).tolist()
        tokens = sample(logits, states, [40 + step] * len(states))
        last = [token.token_id for token in tokens if isinstance(token, SampledToken)]
        expected += last
        for state, token in zip(states, last, strict=True):
            state.observe(token)
    return expected, found


def test_every_setting_chooses_what_the_sampler_chooses() -> None:
    expected, found = chosen_by_both(12, list(range(len(SETTINGS))))

    assert found == expected


def test_counts_follow_rows_that_move_and_leave() -> None:
    expected, found = chosen_by_both(12, list(reversed(range(len(SETTINGS) - 7))))

    assert found == expected


@pytest.mark.parametrize("logits", [LOGITS, LOGITS * float("nan"), LOGITS - float("inf")])
def test_no_settings_and_no_logits_make_a_place_outside_of_the_vocabulary(logits: torch.Tensor) -> None:
    """A device that gathers from outside ends its process."""
    extremes = (5e-324, 1e-300, 1.0, 100.0)
    rows = [
        Sampling(max_tokens=9, temperature=heat, repetition_penalty=repetition, presence_penalty=-100.0, **filters)
        for heat, repetition in itertools.product(extremes, extremes)
        for filters in ({}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 5e-324})
    ]
    states = [SamplerState(one, [0, 1, 4, 5], 2) for one in rows]
    counts = CountRows(rows=len(states), vocabulary=6, device=torch.device("cpu"))
    settings = torch.tensor([settings_row(state, 4) for state in states], dtype=torch.float64)

    found = choose(logits.expand(len(states), -1), settings, counts.update(states, [5] * len(states)))

    assert all(0 <= token < 6 for token in found.tolist())
    if logits is LOGITS:
        answers = sample(logits.expand(len(states), -1), states, [4] * len(states))
        assert found.tolist() == [one.token_id for one in answers if isinstance(one, SampledToken)]
