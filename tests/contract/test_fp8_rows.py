"""Latent rows of 8 bits: whatever the ring, the chunks and the way a row came, what is attended is what is stored."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from contract.prefill_requests import NEEDS_RECORDING
from contract.ring_ranks import Case, Outcome, alone, launch
from contract.test_ring import a_case, rows_of

MODELS = ("v2_lite_greedy", "v3_noaux")
LENGTHS = (64, 333, 1500)
CHUNKS = ("100", "whole")
# Sums in another order differ in the last bit of fp32, and a number on the edge between two of e4m3 then becomes the
# other one. Far more of them would mean that somebody attends to rows that are not the stored ones.
SHARE_ON_EDGES = 0.01
pytestmark = NEEDS_RECORDING


def fp8_case(model: str, length: int, chunk: str) -> Case:
    return dataclasses.replace(a_case(model, length, chunk), latent_format="fp8")


@cache
def whole(model: str, length: int) -> Outcome:
    """Compute a prompt on one rank in one chunk."""
    return alone(fp8_case(model, length, "whole"))


def same(found: list[Outcome], reference: Outcome, length: int) -> None:
    rows, expected = rows_of(found, 0, length), rows_of([reference], 0, length)
    assert (np.abs(rows - expected) > 1e-4).mean() < SHARE_ON_EDGES
    assert found[0].token == reference.token


@pytest.mark.parametrize("ring_size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_tokens_are_those_of_one_rank_and_one_chunk(ring_size: int) -> None:
    names = [(model, length, chunk) for model in MODELS for length in LENGTHS for chunk in CHUNKS]

    found = launch([fp8_case(*name) for name in names], ring_size)

    for (model, length, _), by_rank in zip(names, found, strict=True):
        same(by_rank, whole(model, length), length)


def test_a_prompt_behind_cached_rows_gives_the_token_of_one_that_is_computed_whole() -> None:
    case = fp8_case("v3_noaux", 1500, "100")

    fresh, again = launch([case, dataclasses.replace(case, before=(case.prompt,), seed=b"s" * 16)], 2)

    cached = 1500 // 64 * 64
    assert again[0].cached_tokens == cached
    before, after = rows_of(fresh, 0, 1500), rows_of(again, 0, 1500)
    assert np.array_equal(before[:, :cached], after[:, :cached])
    assert again[0].token == fresh[0].token == whole("v3_noaux", 1500).token


def test_blocks_that_went_to_host_memory_come_back_as_they_were() -> None:
    first = fp8_case("v3_noaux", 1500, "100")
    other = tuple(reversed(first.prompt))
    # Room for one prompt and a bit: the second one drives out most of the first.
    again = dataclasses.replace(first, before=(first.prompt, other), seed=b"s" * 16, num_pages=30, host_pages=64)

    fresh, loaded = alone(first), alone(again)

    assert loaded.counters["host_loads_total"] == 1
    assert loaded.cached_tokens == 1500 // 64 * 64
    cached = slice(0, loaded.cached_tokens)
    assert np.array_equal(rows_of([loaded], 0, 1500)[:, cached], rows_of([fresh], 0, 1500)[:, cached])
    assert loaded.token == fresh.token
