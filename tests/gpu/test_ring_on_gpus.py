"""A ring over GPUs and NCCL computes what one rank on a CPU computes, and the first tokens that were recorded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from contract.ring_ranks import Case, Outcome, alone, launch
from kvrelay.model.embedded_path import embedded_checkpoint
from oracle_data import LENGTHS as ORACLE_LENGTHS
from oracle_data import NAMES, oracle_folder, recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]
LENGTHS = (1, 63, 700, 1900)
RING_SIZES = (1, pytest.param(2, marks=pytest.mark.two_gpus))


def a_case(length: int, ring_size: int) -> Case:
    prompt = torch.randint(2, 4000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return Case(
        embedded_checkpoint(), tuple(prompt), 2 * ring_size * 64, align_tokens=64, ring_block_tokens=256
    )  # fmt: skip


def rows_of(outcomes: list[Outcome]) -> npt.NDArray[np.float32]:
    """Return all rows in (layer, position) order."""
    merged = {key: row for outcome in outcomes for key, row in outcome.rows.items()}
    assert len(merged) == sum(len(outcome.rows) for outcome in outcomes)
    return np.stack([merged[key] for key in sorted(merged)])


def needs_gpus(number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs, {torch.cuda.device_count()} are here")


@pytest.mark.parametrize("ring_size", RING_SIZES)
def test_latents_and_first_tokens_are_those_of_one_rank_on_a_cpu(ring_size: int) -> None:
    needs_gpus(ring_size)
    cases = [a_case(length, ring_size) for length in LENGTHS]

    found = launch(cases, ring_size, device_type="cuda")

    for case, by_rank in zip(cases, found, strict=True):
        expected = alone(case)
        assert by_rank[0].error is None
        assert by_rank[0].token == expected.token, len(case.prompt)
        assert np.abs(rows_of(by_rank) - rows_of([expected])).max() < 2e-3, len(case.prompt)
        assert all(outcome.counters["foreign_blocks_max"] <= 2 for outcome in by_rank)


@pytest.mark.parametrize("ring_size", RING_SIZES)
def test_first_tokens_of_all_oracles_are_the_recorded_ones_in_chunks_and_whole(ring_size: int) -> None:
    needs_gpus(ring_size)
    names = [
        (name, length, chunk) for name in NAMES for length in ORACLE_LENGTHS for chunk in (2 * ring_size * 64, 4096)
    ]
    cases = [
        Case(
            oracle_folder(name), tuple(recording(name, length).prompt), chunk, align_tokens=64, ring_block_tokens=192
        )
        for name, length, chunk in names
    ]  # fmt: skip

    found = launch(cases, ring_size, device_type="cuda")

    wrong = [
        (name, by_rank[0].token, by_rank[0].error)
        for name, by_rank in zip(names, found, strict=True)
        if by_rank[0].token != recording(name[0], name[1]).greedy[0]
    ]
    assert wrong == []
    assert all(outcome.twice == 0 and outcome.sealed for by_rank in found for outcome in by_rank)
