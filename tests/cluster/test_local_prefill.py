"""The next turn of a chat goes to the decode node alone when little is new, and says the same as one process."""

from __future__ import annotations

import random

from cluster.cluster import Cluster, Spec, vocab_size, wait_until
from cluster.one_process import greedy_alone
from kvrelay.proto.convert import pack_ids
from kvrelay.proto.v1 import fleet_pb2
from oracle_data import oracle_folder

ORACLE = "v3_noaux"
FOLDER = oracle_folder(ORACLE)
VOCAB = vocab_size(FOLDER)
SPEC = Spec(FOLDER, chunk_tokens=256, pool_pages=400, environ={"KVRELAY_DECODE_LOCAL_PREFILL_TOKENS": "200"})


def some_ids(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB - 1) for _ in range(num_tokens)]


def _turn(cluster: Cluster, seed: int, *, new_tokens: int) -> list[int]:
    """Have a first turn, and return the prompt of the second one, whose first blocks the index knows."""
    prompt = some_ids(seed, 300)
    first = cluster.generate(prompt, max_tokens=100)
    again = prompt + first.token_ids + some_ids(seed + 1, new_tokens)

    def knows() -> bool:
        preview = cluster.fleet.Preview(fleet_pb2.PreviewRequest(packed_ids=pack_ids(again), max_tokens=8))
        return any(one.role == fleet_pb2.NODE_ROLE_DECODE and one.cached_tokens >= 384 for one in preview.candidates)

    wait_until(knows, 20.0)
    return again


def test_a_short_second_turn_is_computed_by_the_decode_node_alone(cluster: Cluster) -> None:
    again = _turn(cluster, 100, new_tokens=40)
    before = {
        name: cluster.counter(name, role="prefill") for name in ("prefill_tokens_executed", "bytes_written_total")
    }

    second = cluster.generate(again, max_tokens=8)

    nodes = second.finished.nodes
    assert nodes == second.accepted.nodes
    assert nodes.prefill_node == nodes.decode_node
    assert second.usage.cached_tokens == second.usage.resident_tokens == 384
    assert cluster.counter("local_prefill_tokens", role="decode") == len(again) - 384
    assert {name: cluster.counter(name, role="prefill") for name in before} == before
    assert second.token_ids == greedy_alone(FOLDER, again, num_tokens=8)
    split = second.finished.time
    assert split.prefill_ms > 0
    decision = cluster.fleet.Explain(fleet_pb2.ExplainRequest(request_id=second.accepted.request_id))
    assert f"computes the last {len(again) - 384} tokens itself" in decision.way


def test_a_long_second_turn_is_handed_over(cluster: Cluster) -> None:
    again = _turn(cluster, 200, new_tokens=400)
    computed = cluster.counter("local_prefill_tokens", role="decode")

    second = cluster.generate(again, max_tokens=8)

    assert second.finished.nodes.prefill_node != second.finished.nodes.decode_node
    assert cluster.counter("local_prefill_tokens", role="decode") == computed
    assert second.token_ids == greedy_alone(FOLDER, again, num_tokens=8)
