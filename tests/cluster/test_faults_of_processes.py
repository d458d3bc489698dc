"""A process is killed in mid work: an answer or one clear status in time, nothing stays held, and on it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc
import pytest

from cluster.cluster import Answer, Cluster, Spec, status_of, vocab_size, wait_until
from oracle_data import oracle_folder, recording

ORACLE = "v3_noaux"
FOLDER = oracle_folder(ORACLE)
VOCAB = vocab_size(FOLDER)
SPEC = Spec(FOLDER, ring_size="2", chunk_tokens=16, pool_pages=600)
IN_TIME_S = 30.0
CLEAR = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
PROMPT, GREEDY = recording(ORACLE, 1500).prompt, recording(ORACLE, 1500).greedy


def fresh(seed: int) -> list[int]:
    """Return a prompt of the oracle's length that no cache knows."""
    return [(token + seed * 7 + place % 11) % (VOCAB - 1) for place, token in enumerate(PROMPT)]


def in_the_middle(cluster: Cluster, prompt: list[int], *, max_tokens: int, hit: Callable[[], None]) -> Answer | str:
    """Run a request, call `hit` while it works, and return its answer or the name of its status."""
    outcome: list[Answer | str] = []
    call = cluster.start(prompt, max_tokens=max_tokens, timeout_s=IN_TIME_S)

    def read() -> None:
        answer = Answer()
        try:
            for event in call:
                answer.take(event, time.monotonic())
            outcome.append(answer)
        except grpc.RpcError as err:
            code, text = status_of(err)
            assert code in CLEAR, text
            assert text
            outcome.append(code.name)

    reader = threading.Thread(target=read)
    reader.start()
    hit()
    reader.join(IN_TIME_S + 5)
    assert not reader.is_alive(), "the client still waits"
    assert outcome, "neither an answer nor a clear status"
    return outcome[0]


def busy(cluster: Cluster, node: str) -> None:
    wait_until(lambda: cluster.stats()[node].active_requests > 0, 20)


def serves_again(cluster: Cluster) -> None:
    """The fleet is whole, and the next request is answered right."""
    wait_until(lambda: {"prefill-0", "decode-0"} <= set(cluster.stats()), 40, cluster.logs)

    def answered() -> bool:
        return bool(cluster.generate(PROMPT, max_tokens=24).token_ids == GREEDY)

    wait_until(answered, 30, cluster.logs)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])  # P3 also kills a node of one rank
def test_a_prefill_rank_is_killed_during_prefill(cluster: Cluster, rank: int) -> None:
    before = {record.node.name: record.node.start_id for record in cluster.nodes()}

    def hit() -> None:
        busy(cluster, "prefill-0")
        cluster.process("prefill-0", rank=rank).kill()

    outcome = in_the_middle(cluster, fresh(rank + 1), max_tokens=24, hit=hit)

    assert isinstance(outcome, Answer) or outcome in {"UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED"}
    serves_again(cluster)
    after = {record.node.name: record.node.start_id for record in cluster.nodes()}
    assert after["prefill-0"] != before["prefill-0"]  # the ring left as a whole and came back as a new one
    assert after["decode-0"] == before["decode-0"]
    cluster.assert_settled(25)


@pytest.mark.full  # F5 kills one by default
def test_a_decode_node_is_killed_during_decode(cluster: Cluster) -> None:
    def hit() -> None:
        wait_until(lambda: cluster.stats()["decode-0"].active_requests > 0, 20)
        time.sleep(0.3)
        cluster.process("decode-0").kill()

    in_the_middle(cluster, fresh(5), max_tokens=500, hit=hit)

    serves_again(cluster)
    cluster.assert_settled(25)


def test_the_index_server_is_killed_during_prefill(cluster: Cluster) -> None:
    def hit() -> None:
        busy(cluster, "prefill-0")
        cluster.process("index").kill()

    outcome = in_the_middle(cluster, fresh(6), max_tokens=24, hit=hit)

    assert isinstance(outcome, Answer), outcome  # nobody needs the index to finish
    serves_again(cluster)


def test_requests_are_served_while_the_index_is_away(cluster: Cluster) -> None:
    cluster.process("index").kill()

    assert cluster.generate(PROMPT, max_tokens=24).token_ids == GREEDY
    serves_again(cluster)
