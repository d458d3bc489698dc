"""Every token that a whole cluster streams is the one that the recorded reference computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cluster.cluster import Cluster, Spec, running
from oracle_data import LENGTHS, MAX_MODEL_LEN, NAMES, oracle_folder, recording

# Model, ring size, prompt tokens per step (None = the whole prompt at once).
CHOSEN = [("v2_yarn", 1, 100), ("v3_dynamic_ntk", 3, 100), ("v3_odd_dims", 1, None)]
CASES = [
    pytest.param((name, ring_size, chunk), id=f"{name}-ring{ring_size}-chunk{chunk}")
    for name, ring_size, chunk in CHOSEN
] + [
    pytest.param((name, ring_size, chunk), id=f"{name}-ring{ring_size}-chunk{chunk}", marks=pytest.mark.full)
    for name in NAMES
    for ring_size in (1, 3)
    for chunk in (16, 100, None)
    if (name, ring_size, chunk) not in CHOSEN
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, int, int | None]:
    found: tuple[str, int, int | None] = request.param
    return found


@pytest.fixture(scope="module")
def cluster(case: tuple[str, int, int | None]) -> Iterator[Cluster]:
    name, ring_size, chunk = case
    with running(Spec(oracle_folder(name), ring_size=str(ring_size), chunk_tokens=chunk or MAX_MODEL_LEN)) as started:
        yield started


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_and_probabilities_are_the_recorded_ones(
    cluster: Cluster, case: tuple[str, int, int | None], length: int
) -> None:
    recorded = recording(case[0], length)

    answer = cluster.generate(recorded.prompt, max_tokens=len(recorded.greedy), logprobs=0)

    assert answer.token_ids == recorded.greedy
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    for position, logits in zip(recorded.positions, recorded.logits, strict=True):
        step = position - (length - 1)  # the row at position p predicts token p + 1
        if 0 <= step < len(recorded.greedy):
            expected = logits[recorded.greedy[step]] - np.logaddexp.reduce(logits.astype(np.float64))
            assert answer.logprobs[step].logprob == pytest.approx(expected, abs=1e-3), f"step {step}"


def expected_logprobs(name: str, length: int) -> dict[int, float]:
    """Return, by position, the log-probability of each prompt token that the recording has logits for."""
    recorded = recording(name, length)
    return {
        position + 1: logits[recorded.prompt[position + 1]] - np.logaddexp.reduce(logits.astype(np.float64))
        for position, logits in zip(recorded.positions, recorded.logits, strict=True)
        if position + 1 < length
    }


@pytest.mark.parametrize("length", [1, 333, 1500])
def test_prompt_probabilities_are_the_recorded_ones_whatever_is_cached(
    cluster: Cluster, case: tuple[str, int, int | None], length: int
) -> None:
    prompt = recording(case[0], length).prompt
    cluster.generate(prompt, max_tokens=2)  # leaves the prompt in both caches

    one = cluster.generate(prompt, max_tokens=1, prompt_logprobs=True)
    many = cluster.generate(prompt, max_tokens=4, prompt_logprobs=True)

    assert one.usage.cached_tokens == many.usage.cached_tokens == 0
    assert len(one.prompt_logprobs) == length - 1
    assert one.prompt_logprobs == pytest.approx(many.prompt_logprobs, abs=1e-5)
    for position, expected in expected_logprobs(case[0], length).items():
        assert one.prompt_logprobs[position - 1] == pytest.approx(expected, abs=1e-3), f"position {position}"


def test_usage_counts_the_prompt_and_the_answer(cluster: Cluster, case: tuple[str, int, int | None]) -> None:
    answer = cluster.generate(recording(case[0], 64).prompt, max_tokens=5)

    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (64, 5)
    assert answer.accepted.prompt_tokens == 64
