"""Bad input is one clear status for that request; nothing else notices."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from cluster.cluster import Cluster, a_request, status_of, vocab_size
from cluster.specs import EVERY_LINE_LOGGED
from kvrelay.proto.v1 import inference_pb2
from oracle_data import recording

ORACLE = "v3_noaux"
SPEC = EVERY_LINE_LOGGED
VOCAB = vocab_size(SPEC.model)
GOOD = [1, 2, 3]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def refusal(cluster: Cluster, request: inference_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.inference.Generate(request, timeout=10))
    return status_of(caught.value)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {"max_tokens": 4}, ["empty"]),
        ([1] * 2046, {"max_tokens": 4}, ["2050", "2048"]),
        ([1] * 2100, {"max_tokens": 1}, ["2101", "2048"]),
        ([VOCAB], {"max_tokens": 4}, [str(VOCAB)]),
        ([2**32 - 1], {"max_tokens": 4}, []),
        (GOOD, {"max_tokens": 4, "temperature": math.nan}, ["temperature"]),
        (GOOD, {"max_tokens": 4, "temperature": -1.0}, ["temperature"]),
        (GOOD, {"max_tokens": 4, "temperature": math.inf}, ["temperature"]),
        (GOOD, {"max_tokens": 4, "top_p": 0.0}, ["top_p"]),
        (GOOD, {"max_tokens": 4, "top_p": 1.5}, ["top_p"]),
        (GOOD, {"max_tokens": 4, "min_p": -0.1}, ["min_p"]),
        (GOOD, {"max_tokens": 4, "repetition_penalty": 0.0}, ["repetition_penalty"]),
        (GOOD, {"max_tokens": 4, "presence_penalty": 1000.0}, ["presence_penalty"]),
        (GOOD, {"max_tokens": 4, "frequency_penalty": math.nan}, ["frequency_penalty"]),
        (GOOD, {"max_tokens": 4, "logprobs": 21}, ["logprobs"]),
        (GOOD, {"max_tokens": 4, "stop_token_ids": [VOCAB]}, ["stop_token_ids"]),
        (GOOD, {"max_tokens": 4, "stop_strings": ["x"] * 17}, ["stop_strings"]),
        (GOOD, {"max_tokens": 4, "stop_strings": [""]}, ["stop_strings"]),
    ],
)
def test_a_wrong_request_is_refused_with_the_value_and_the_limit(
    cluster: Cluster, prompt: list[int], sampling: dict[str, Any], words: list[str]
) -> None:
    code, text = refusal(cluster, a_request(prompt, **sampling))

    assert code is INVALID, text
    assert all(word in text for word in words), text


def test_packed_ids_of_a_broken_length_are_refused(cluster: Cluster) -> None:
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(packed_ids=b"12345"))

    assert refusal(cluster, request)[0] is INVALID


def test_a_request_without_a_prompt_is_refused(cluster: Cluster) -> None:
    assert refusal(cluster, inference_pb2.GenerateRequest())[0] is INVALID


def test_text_needs_a_tokenizer(cluster: Cluster) -> None:
    code, text = refusal(cluster, a_request("hello", max_tokens=4))

    assert code is INVALID
    assert "tokenizer" in text


def test_an_unknown_model_is_not_found(cluster: Cluster) -> None:
    request = a_request(GOOD, max_tokens=4)
    request.model = "another"

    code, text = refusal(cluster, request)

    assert code is grpc.StatusCode.NOT_FOUND
    assert "another" in text


def test_a_message_over_the_limit_is_refused_with_the_limit(cluster: Cluster) -> None:
    code, text = refusal(cluster, a_request([1] * (9 << 20), max_tokens=4))

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(32 << 20) in text


def test_a_deadline_shorter_than_the_work_ends_the_request(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.inference.Generate(a_request([1] * 400, max_tokens=100), timeout=0.01))

    assert status_of(caught.value)[0] is grpc.StatusCode.DEADLINE_EXCEEDED


def test_good_requests_go_on_between_bad_ones(cluster: Cluster) -> None:
    length = 64
    for request in (a_request([]), a_request([VOCAB]), a_request(GOOD, temperature=math.nan)):
        refusal(cluster, request)

        answer = cluster.generate(recording(ORACLE, length).prompt, max_tokens=24)
        assert answer.token_ids == recording(ORACLE, length).greedy


def test_a_request_that_ends_at_prefill_holds_nothing(cluster: Cluster) -> None:
    prompt, greedy = recording(ORACLE, 64).prompt, recording(ORACLE, 64).greedy

    one = cluster.generate(prompt, max_tokens=1)
    stopped = cluster.generate(prompt, max_tokens=8, stop_token_ids=[greedy[0]])

    assert one.token_ids == greedy[:1]
    assert one.finished.nodes.decode_node == ""
    assert stopped.usage.completion_tokens <= 1


def test_a_cancelled_request_leaves_nothing(cluster: Cluster) -> None:
    call = cluster.start(recording(ORACLE, 333).prompt, max_tokens=150)
    for event in call:
        if event.WhichOneof("event") == "tokens":
            break

    call.cancel()

    cluster.assert_settled()
