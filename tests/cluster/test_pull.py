"""A chat goes on at a prefill node that has never seen it: what decode has is fetched, and the answer is the same."""

from __future__ import annotations

import random

from cluster.cluster import Cluster, Spec, vocab_size, wait_until
from cluster.one_process import greedy_alone
from kvrelay.proto.v1 import fleet_pb2
from oracle_data import oracle_folder

ORACLE = "v3_noaux"
FOLDER = oracle_folder(ORACLE)
VOCAB = vocab_size(FOLDER)
SPEC = Spec(FOLDER, prefill=2, chunk_tokens=256, pool_pages=400, environ={"KVRELAY_PREFILL_PULL_TIMEOUT_S": "10"})
BLOCK = 64


def test_prompt_and_answer_of_the_first_turn_are_pulled_for_the_second(cluster: Cluster) -> None:
    rng = random.Random(7)
    turn = [rng.randrange(VOCAB - 1) for _ in range(1500)]
    first = cluster.generate(turn, max_tokens=100)
    again = turn + first.token_ids + [rng.randrange(VOCAB - 1) for _ in range(60)]
    held = (len(turn) + 99) // BLOCK * BLOCK  # the last token of the answer was never fed back
    packed = b"".join(token.to_bytes(4, "little") for token in again)

    # The node that computed the first turn leaves; the other one knows nothing of it.
    went, other = sorted(("prefill-0", "prefill-1"), key=lambda name: name != first.finished.nodes.prefill_node)
    before = cluster.stats()[other].counters["prefill_tokens_executed"]
    cluster.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name=went), timeout=5)
    wait_until(lambda: went not in {one.node.name for one in cluster.nodes()}, 15.0)

    def way() -> str:
        return str(cluster.fleet.Preview(fleet_pb2.PreviewRequest(packed_ids=packed, max_tokens=8)).way)

    wait_until(lambda: f"pull from decode-0 {held} tokens" in way(), 10.0, way)
    second = cluster.generate(again, max_tokens=8)

    assert second.token_ids == greedy_alone(FOLDER, again, num_tokens=8)
    assert second.finished.nodes.prefill_node == other
    assert second.usage.cached_tokens == held
    counters = cluster.stats()[other].counters
    assert counters["pulled_tokens_total"] == held
    assert counters["prefill_tokens_executed"] - before == len(again) - held
    assert cluster.counter("pushed_tokens_total", role="decode") == held
    decision = cluster.fleet.Explain(fleet_pb2.ExplainRequest(request_id=second.accepted.request_id))
    assert f"pull from decode-0 {held} tokens" in decision.way
