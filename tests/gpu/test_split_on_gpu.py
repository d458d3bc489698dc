"""A whole cluster with every compute process on GPUs: NIXL writes from device memory into device memory.

The processes share one GPU when there is only one. Tokens are those of the recorded reference, as on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cluster.cluster import Cluster, Spec, running
from oracle_data import LENGTHS, oracle_folder, recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]
CHUNK_TOKENS = 256
RING_SIZE = str(min(2, torch.cuda.device_count()))
ON_THE_SECOND = {"KVRELAY_DECODE_DEVICE": "cuda:1"}  # decode, of whose ring the second rank is there, too
THREE_PROCESSES = [
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CASES = [
    *(pytest.param((name, {}), id=name) for name in ("v2_lite_greedy", "v3_noaux", "v3_yarn")),
    *(
        pytest.param((name, ON_THE_SECOND), id=f"{name}-decode-on-the-second", marks=THREE_PROCESSES)
        for name in ("v2_lite_greedy", "v3_yarn")
    ),
]


@pytest.fixture(scope="module", params=CASES)
def split(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    name, environ = request.param
    spec = Spec(oracle_folder(name), ring_size=RING_SIZE, chunk_tokens=CHUNK_TOKENS, environ=environ)
    with running(spec) as started:
        yield name, started


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_the_recorded_ones(split: tuple[str, Cluster], length: int) -> None:
    name, cluster = split
    recorded = recording(name, length)

    answer = cluster.generate(recorded.prompt, max_tokens=len(recorded.greedy))

    assert answer.token_ids == recorded.greedy
    cluster.assert_settled()


def test_a_second_prompt_uses_what_both_sides_hold(split: tuple[str, Cluster]) -> None:
    name, cluster = split
    recorded = recording(name, 1500)

    answer = cluster.generate(recorded.prompt, max_tokens=len(recorded.greedy))

    assert answer.token_ids == recorded.greedy
    assert answer.usage.cached_tokens >= 1408
    assert answer.usage.resident_tokens >= 1408
