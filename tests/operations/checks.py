"""The list of operations tests. Modules import them and say, by a fixture `deployment`, what they run on."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from cluster.cluster import Answer, finish, status_of, vocab_size, wait_until
from operations.deployment import MODEL, Deployment
from operations.load import Load
from oracle_data import oracle_folder, recording

CLEAR = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
SETTLE_S = 30.0
SERVES_S = 40.0
# A decode node whose hand-off peer is out of reach has this long to be redone elsewhere or to fail.
OUTCOME_S = 40.0


def vocabulary() -> int:
    return vocab_size(oracle_folder(MODEL))


def answers_right(deployment: Deployment, length: int = 333) -> bool:
    told = recording(MODEL, length)
    return bool(deployment.client.generate(told.prompt, max_tokens=24).token_ids == told.greedy)


def serves_again(deployment: Deployment) -> None:
    wait_until(lambda: answers_right(deployment), SERVES_S, deployment.logs)
    deployment.client.assert_settled(SETTLE_S)


def test_a_prompt_is_answered_with_the_recorded_tokens(deployment: Deployment) -> None:
    for length in (1, 64, 333):
        assert answers_right(deployment, length)
    deployment.client.assert_settled()


def test_a_prefix_is_computed_and_sent_once(deployment: Deployment) -> None:
    deployment.scale("prefill", 1)
    deployment.scale("decode", 1)
    prompt = [7, *recording(MODEL, 1500).prompt[:639]]
    first = deployment.client.generate(prompt, max_tokens=8)
    second = deployment.client.generate(prompt, max_tokens=8)

    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 576)  # the last block is always computed
    assert first.usage.resident_tokens == 0
    assert second.usage.resident_tokens in (640, 576)  # a hand-off of no bytes, or the last block computed by decode
    assert second.token_ids == first.token_ids


def test_decode_is_scaled_out_and_in_under_load(deployment: Deployment) -> None:
    deployment.scale("decode", 1)
    with Load(deployment.client, clients=4, vocab_size=vocabulary()) as load:
        deployment.scale("decode", 3)
        before = load.decode_nodes
        wait_until(lambda: len(load.decode_nodes - before) == 3, SERVES_S, lambda: str(load.decode_nodes))
        deployment.scale("decode", 1)
        before_s = len(load.answers)
        wait_until(lambda: len(load.answers) > before_s + 4, SERVES_S)

    assert not load.failures, load.failures[:5]
    assert len(deployment.members("decode")) == 1
    deployment.client.assert_settled(SETTLE_S)


def test_a_decode_node_is_killed_while_it_streams(deployment: Deployment) -> None:
    deployment.scale("decode", 1)
    node = deployment.members("decode")[0]
    call = deployment.client.start([5, 6, 7], max_tokens=1500, ignore_eos=True, timeout_s=OUTCOME_S)
    events = iter(call)
    wait_until(lambda: next(events).WhichOneof("event") == "tokens", 20)

    deployment.kill(node)

    with pytest.raises(grpc.RpcError) as failed:
        for _ in events:
            pass
    code, text = status_of(failed.value)
    assert code in CLEAR, text
    assert text
    deployment.revive(node)
    serves_again(deployment)


def test_a_killed_prefill_node_costs_no_request_while_another_is_there(deployment: Deployment) -> None:
    deployment.scale("prefill", 2)
    victim = deployment.members("prefill")[0]
    with Load(deployment.client, clients=3, vocab_size=vocabulary()) as load:
        wait_until(lambda: len(load.answers) > 3, SERVES_S)
        deployment.kill(victim)
        seen = len(load.answers)
        wait_until(lambda: len(load.answers) > seen + 6, SERVES_S, lambda: str(load.failures))

    assert not load.failures, load.failures[:5]
    deployment.revive(victim)
    serves_again(deployment)


def test_two_nodes_that_cannot_reach_each_other(deployment: Deployment) -> None:
    deployment.scale("prefill", 1)
    deployment.scale("decode", 1)
    outcome: list[Answer | grpc.StatusCode] = []

    def ask() -> None:
        call = deployment.client.start([9, *recording(MODEL, 1500).prompt[:900]], max_tokens=8, timeout_s=OUTCOME_S)
        try:
            outcome.append(finish(call, began_s=time.monotonic()))
        except grpc.RpcError as err:
            outcome.append(status_of(err)[0])

    asking = threading.Thread(target=ask)
    with deployment.isolated(deployment.members("prefill")[0], deployment.members("decode")[0]):
        asking.start()
        time.sleep(6)
    asking.join(OUTCOME_S + 5)

    assert outcome, "the client still waits"
    assert isinstance(outcome[0], Answer) or outcome[0] in CLEAR
    serves_again(deployment)


def test_a_rolling_restart_under_load_costs_no_request(deployment: Deployment) -> None:
    for role in ("router", "prefill", "decode"):
        deployment.scale(role, 2)
    with Load(deployment.client, clients=6, vocab_size=vocabulary()) as load:
        for role in ("decode", "prefill", "router"):
            for name in deployment.members(role):
                deployment.restart(name)

    assert not load.failures, load.failures[:5]
    assert len(load.answers) > 20
    serves_again(deployment)
