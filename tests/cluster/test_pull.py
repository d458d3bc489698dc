"""What another node has of a prompt is fetched: from a busy prefill node, and, where a chat goes on at a prefill node
that has never seen it, from the decode node. The answers are the same.
"""

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
SPEC = Spec(FOLDER, prefill=2, chunk_tokens=256, pool_pages=400, environ={"KVRELAY_PREFILL_PULL_TIMEOUT_S": "10"})
BLOCK = 64


def test_a_prefix_that_many_ask_for_at_once_spreads_to_the_other_prefill_node_without_being_computed_again(
    cluster: Cluster,
) -> None:
    rng = random.Random(8)
    prefix = [rng.randrange(VOCAB - 1) for _ in range(1100)]
    went = cluster.generate(prefix, max_tokens=1).finished.nodes.prefill_node  # no decode node has it
    prompts = [prefix + [rng.randrange(VOCAB - 1) for _ in range(800)] for _ in range(6)]
    held = len(prefix) // BLOCK * BLOCK
    executed = cluster.counter("prefill_tokens_executed", role="prefill")

    def cached() -> dict[str, int]:
        asked = fleet_pb2.PreviewRequest(packed_ids=pack_ids(prompts[0]), max_tokens=8)
        return {one.node: one.cached_tokens for one in cluster.fleet.Preview(asked).candidates}

    wait_until(lambda: cached()[went] == held, 30.0, cached)
    answers = cluster.finish_all([cluster.start(prompt, max_tokens=4) for prompt in prompts])

    assert [one.token_ids for one in answers] == [greedy_alone(FOLDER, one, num_tokens=4) for one in prompts]
    why = [cluster.fleet.Explain(fleet_pb2.ExplainRequest(request_id=one.accepted.request_id)) for one in answers]
    (other,) = {"prefill-0", "prefill-1"} - {went}
    assert {one.finished.nodes.prefill_node for one in answers} == {went, other}, why
    counters = cluster.stats()
    assert counters[other].counters["pulled_tokens_total"] == held
    assert counters[went].counters["pushed_tokens_total"] == held
    assert cluster.counter("prefill_tokens_executed", role="prefill") - executed == sum(map(len, prompts)) - 6 * held
    assert any(f"pull from {went} {held} tokens" in one.way for one in why)


def test_prompt_and_answer_of_the_first_turn_are_pulled_for_the_second(cluster: Cluster) -> None:
    rng = random.Random(7)
    turn = [rng.randrange(VOCAB - 1) for _ in range(1500)]
    first = cluster.generate(turn, max_tokens=100)
    again = turn + first.token_ids + [rng.randrange(VOCAB - 1) for _ in range(60)]
    held = (len(turn) + 99) // BLOCK * BLOCK  # the last token of the answer was never fed back

    # The node that computed the first turn leaves; the other one knows nothing of it.
    went, other = sorted(("prefill-0", "prefill-1"), key=lambda name: name != first.finished.nodes.prefill_node)
    before = cluster.stats()[other].counters
    cluster.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name=went), timeout=5)
    wait_until(lambda: went not in {one.node.name for one in cluster.nodes()}, 30.0)

    def way() -> str:
        return str(cluster.fleet.Preview(fleet_pb2.PreviewRequest(packed_ids=pack_ids(again), max_tokens=8)).way)

    wait_until(lambda: f"pull from decode-0 {held} tokens" in way(), 30.0, way)
    second = cluster.generate(again, max_tokens=8)

    assert second.token_ids == greedy_alone(FOLDER, again, num_tokens=8)
    assert second.finished.nodes.prefill_node == other
    assert second.usage.cached_tokens == held
    counters = cluster.stats()[other].counters
    assert counters["pulled_tokens_total"] - before.get("pulled_tokens_total", 0.0) == held
    assert counters["prefill_tokens_executed"] - before["prefill_tokens_executed"] == len(again) - held
    assert cluster.counter("pushed_tokens_total", role="decode") == held
    decision = cluster.fleet.Explain(fleet_pb2.ExplainRequest(request_id=second.accepted.request_id))
    assert f"pull from decode-0 {held} tokens" in decision.way
