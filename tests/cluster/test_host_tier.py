"""A prompt that a ring's pools had to let go of comes back from host memory, and the answer is the same."""

from __future__ import annotations

import random

import grpc
import pytest

from cluster.cluster import Cluster, Spec, vocab_size, wait_until
from cluster.one_process import greedy_alone
from kvrelay.proto.convert import pack_ids
from kvrelay.proto.v1 import fleet_pb2
from oracle_data import oracle_folder

ORACLE = "v3_noaux"
FOLDER = oracle_folder(ORACLE)
VOCAB = vocab_size(FOLDER)
TOKENS, BLOCK = 1500, 64
SPEC = Spec(
    FOLDER,
    ring_size="2",
    chunk_tokens=256,
    pool_pages=40,  # per rank: room for three prompts in all
    environ={"KVRELAY_PREFILL_HOST_CACHE_GIB": "0.05"},
)


def test_what_was_evicted_is_loaded_on_both_ranks_and_changes_no_token(cluster: Cluster) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCAB - 1) for _ in range(TOKENS)] for _ in range(5)]
    for prompt in prompts:
        first = cluster.generate(prompt, max_tokens=4)
        assert first.usage.cached_tokens == 0
    before = cluster.stats()["prefill-0"].counters
    assert before["host_saved_total"] > 0
    assert before["host_bytes"] > 0

    def way() -> str:
        asked = fleet_pb2.PreviewRequest(packed_ids=pack_ids(prompts[0]), max_tokens=8)
        return str(cluster.fleet.Preview(asked).way)

    wait_until(lambda: "prefill-0 loads" in way(), 10.0, way)
    again = cluster.generate(prompts[0], max_tokens=8)

    assert again.token_ids == greedy_alone(FOLDER, prompts[0], num_tokens=8)
    whole = (TOKENS - 1) // BLOCK * BLOCK
    assert again.usage.cached_tokens == whole
    after = cluster.stats()["prefill-0"].counters
    assert after["prefill_tokens_executed"] - before["prefill_tokens_executed"] == TOKENS - whole
    assert (after["host_hits_total"], after["host_loads_total"]) == (1, 1)
    assert all(after[f"host_loaded_bytes_total_rank{rank}"] > 0 for rank in range(2))
    decision = cluster.fleet.Explain(fleet_pb2.ExplainRequest(request_id=again.accepted.request_id))
    assert "from host memory" in decision.way
    (prefill,) = [one for one in decision.candidates if one.role == fleet_pb2.NODE_ROLE_PREFILL]
    assert 0 < prefill.parts_s["host_s"] < prefill.parts_s["host_s"] + prefill.parts_s["compute_s"]

    def published_s() -> float:
        return next(one.host_token_s for one in cluster.nodes() if one.node.name == "prefill-0")

    wait_until(lambda: published_s() > 0, 20.0)  # with the next heartbeat


def test_a_cancelled_request_does_not_take_its_load_with_it(cluster: Cluster) -> None:
    rng = random.Random(12)
    prompts = [[rng.randrange(VOCAB - 1) for _ in range(TOKENS)] for _ in range(5)]
    for prompt in prompts:
        cluster.generate(prompt, max_tokens=1)
    call = cluster.start(prompts[0], max_tokens=50)
    next(iter(call))
    assert call.cancel()
    with pytest.raises(grpc.RpcError):
        list(call)
    cluster.assert_settled()
    assert cluster.generate(prompts[0], max_tokens=4).token_ids == greedy_alone(FOLDER, prompts[0], num_tokens=4)
