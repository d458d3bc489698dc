"""Whatever the ring, the chunks and the placement: the same latents in somebody's pages, the same first token."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from contract.ring_ranks import Case, Outcome, alone, launch
from kvrelay.prefill_node.job_events import Done, Failed, FirstToken, Progress
from oracle_data import FOLDER

MODELS = ("v2_lite_greedy", "v3_noaux", "v3_dynamic_ntk", "v3_odd_dims")
CHUNKS = {"16": 16, "100": 100, "whole": 4096}
LENGTHS = (1, 7, 64, 333, 1500)
TOLERANCE = 1e-4


@cache
def recorded(model: str) -> dict[str, npt.NDArray[Any]]:
    path = FOLDER / model / "oracle.npz"
    if not path.exists():
        pytest.skip(f"recorded reference {model} is not on this machine")
    with np.load(path) as arrays:
        return dict(arrays)


def a_case(model: str, length: int, chunk: str) -> Case:
    prompt = recorded(model)[f"prompt_{length}"]
    # Small rotating blocks, so that a prompt of 1,500 tokens takes several laps.
    return Case(FOLDER / model, tuple(prompt.tolist()), CHUNKS[chunk], ring_block_tokens=200)


# Sixteen-token chunks of the longest prompt would take a hundred steps and prove nothing that the others do not.
PLACES = [
    (i + j + k, (model, length, chunk))
    for i, model in enumerate(MODELS)
    for j, length in enumerate(LENGTHS)
    for k, chunk in enumerate(CHUNKS)
    if (length, chunk) != (1500, "16")
]
EVERY = [name for _, name in PLACES]
FEW = [name for place, name in PLACES if place % 3 == 0]  # each model, each length and each chunk meets each other
ALIGNED = [(model, length) for model in MODELS[:2] for length in (64, 333, 1500)]


def rows_of(outcomes: list[Outcome], first: int, end: int) -> npt.NDArray[np.float32]:
    """Return [layers, tokens, W] from what all ranks handed over; each row must be there exactly once."""
    merged: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
    for outcome in outcomes:
        assert outcome.twice == 0
        assert not merged.keys() & outcome.rows.keys()
        merged |= outcome.rows
    layers = 1 + max(layer for layer, _ in merged)
    assert merged.keys() == {(layer, position) for layer in range(layers) for position in range(first, end)}
    return np.stack([[merged[layer, position] for position in range(first, end)] for layer in range(layers)])


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], npt.NDArray[np.float32]]:
    """Latents of each prompt, computed whole on one rank."""
    return {
        (model, length): rows_of([alone(a_case(model, length, "whole"))], 0, length)
        for model in MODELS
        for length in LENGTHS
    }


@pytest.fixture(
    scope="module",
    params=[(1, FEW), (3, FEW), *(pytest.param((size, EVERY), marks=pytest.mark.full) for size in (1, 2, 3))],
    ids=lambda param: f"{param[0]}-{len(param[1])}",
)
def ring(request: pytest.FixtureRequest) -> tuple[int, dict[tuple[str, int, str], list[Outcome]]]:
    size, wanted = request.param
    cases = [a_case(*name) for name in wanted]
    aligned = [
        dataclasses.replace(a_case(model, length, "whole"), chunk_tokens=2 * size * 64, align_tokens=64)
        for model, length in ALIGNED
    ]
    found = launch([*cases, *aligned], size)
    names = [*wanted, *((model, length, "aligned") for model, length in ALIGNED)]
    return size, dict(zip(names, found, strict=True))


@pytest.mark.timeout(400)
def test_latents_equal_those_of_one_rank_and_tokens_equal_the_reference(
    ring: tuple[int, dict[tuple[str, int, str], list[Outcome]]],
    references: dict[tuple[str, int], npt.NDArray[np.float32]],
) -> None:
    _, outcomes = ring
    for (model, length, chunk), by_rank in outcomes.items():
        name = f"{model} {length} tokens, chunk {chunk}"
        rows = rows_of(by_rank, 0, length)
        worst = np.abs(rows - references[model, length]).max()
        assert worst < TOLERANCE, f"{name}: {worst}"
        assert by_rank[0].error is None, name
        assert by_rank[0].token == recorded(model)[f"greedy_{length}"][0], name
        assert all(outcome.sealed for outcome in by_rank), name


def test_one_rank_computes_the_recorded_latents(references: dict[tuple[str, int], npt.NDArray[np.float32]]) -> None:
    for model in MODELS:
        latents = recorded(model)["kv_latent"]
        rows = references[model, 64]
        assert np.abs(rows[..., : latents.shape[-1]] - latents).max() < TOLERANCE, model


def test_work_is_shared_equally_on_long_prompts(
    ring: tuple[int, dict[tuple[str, int, str], list[Outcome]]],
) -> None:
    _, outcomes = ring
    for (model, length, chunk), by_rank in outcomes.items():
        pairs = [outcome.counters.get("attention_pairs", 0.0) for outcome in by_rank]
        layers = recorded(model)["kv_latent"].shape[0]
        assert sum(pairs) == layers * length * (length + 1) / 2, (model, length, chunk)
        if length == 1500 and chunk == "whole":
            assert max(pairs) - min(pairs) <= 0.05 * sum(pairs) / len(pairs), (model, pairs)


def test_at_most_two_foreign_blocks_are_held(ring: tuple[int, dict[tuple[str, int, str], list[Outcome]]]) -> None:
    size, outcomes = ring
    held = max(outcome.counters["foreign_blocks_max"] for by_rank in outcomes.values() for outcome in by_rank)
    assert held == min(size - 1, 2)


def test_every_token_is_executed_once_over_all_ranks(
    ring: tuple[int, dict[tuple[str, int, str], list[Outcome]]],
) -> None:
    _, outcomes = ring
    for (model, length, chunk), by_rank in outcomes.items():
        executed = sum(outcome.counters["prefill_tokens_executed"] for outcome in by_rank)
        assert executed == length, (model, length, chunk)


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_failed_hand_off_fails_a_request_unless_its_first_token_ends_it(max_tokens: int) -> None:
    case = a_case("v2_lite_greedy", 64, "whole")
    case = dataclasses.replace(case, max_tokens=max_tokens, handoff_failure="decode is gone")

    told = alone(case).told

    assert isinstance(told[-2], FirstToken | Progress)
    assert isinstance(told[-1], Done if max_tokens == 1 else Failed)
