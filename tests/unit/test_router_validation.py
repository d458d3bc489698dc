"""What is let in, and how what is not is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvrelay.core.errors import InvalidRequestError, UnknownModelError
from kvrelay.core.types import Sampling
from kvrelay.proto.v1 import common_pb2
from kvrelay.router.validation import Limits, ValidRequest, check_model, read_packed_ids, validate

LIMITS = Limits("m", vocab_size=100, max_model_len=50, eos_token_ids=(2, 3), has_tokenizer=True)


def valid(ids: list[int], limits: Limits = LIMITS, **sampling: Any) -> ValidRequest:
    return validate(np.array(ids, dtype=np.uint32), common_pb2.Sampling(**sampling), limits)


@pytest.mark.parametrize(
    ("ids", "sampling", "words"),
    [
        ([], {}, ["empty"]),
        ([1, 2, 100], {}, ["100", "position 2", "vocabulary"]),
        ([2**32 - 1], {}, [str(2**32 - 1), "position 0", "100"]),
        ([1] * 48, {"max_tokens": 3}, ["48", "3", "51", "50"]),
        ([1] * 50, {}, ["51", "50"]),
        ([1], {"max_tokens": 2**32 - 1}, [str(2**32 - 1), "50"]),
        ([1], {"temperature": math.nan}, ["temperature", "nan"]),
        ([1], {"temperature": math.inf}, ["temperature"]),
        ([1], {"temperature": -0.1}, ["temperature", "-0.1"]),
        ([1], {"temperature": 100.1}, ["temperature", "100"]),
        ([1], {"top_p": 0.0}, ["top_p", "(0, 1]"]),
        ([1], {"top_p": 1.01}, ["top_p"]),
        ([1], {"top_p": math.nan}, ["top_p"]),
        ([1], {"min_p": 1.5}, ["min_p"]),
        ([1], {"repetition_penalty": 0.0}, ["repetition_penalty"]),
        ([1], {"repetition_penalty": -math.inf}, ["repetition_penalty"]),
        ([1], {"presence_penalty": 101.0}, ["presence_penalty", "100"]),
        ([1], {"frequency_penalty": math.nan}, ["frequency_penalty"]),
        ([1], {"logprobs": 21}, ["logprobs", "21", "20"]),
        ([1], {"stop_token_ids": [100]}, ["stop_token_ids", "100"]),
        ([1], {"stop_token_ids": [1] * 257}, ["stop_token_ids", "257", "256"]),
        ([1], {"stop_strings": ["a"] * 17}, ["stop_strings", "17", "16"]),
        ([1], {"stop_strings": [""]}, ["stop_strings", "0 bytes"]),
        ([1], {"stop_strings": ["é" * 129]}, ["stop_strings", "258", "256"]),
    ],
)
def test_a_refusal_names_the_value_and_the_limit(ids: list[int], sampling: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        valid(ids, **sampling)

    assert [word for word in words if word not in str(caught.value)] == []


def test_the_edges_are_let_in() -> None:
    for sampling in (
        {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 0.01, "logprobs": 20},
        {"presence_penalty": -100.0, "frequency_penalty": 100.0, "logprobs": 0, "top_k": 2**31},
        {"stop_strings": ["é" * 128] * 16, "stop_token_ids": [99]},
    ):
        assert valid([0, 99], max_tokens=48, **sampling).total_tokens == 50


def test_no_max_tokens_means_up_to_the_limit() -> None:
    assert valid([1] * 8).sampling.max_tokens == 42
    assert valid([1] * 49).sampling.max_tokens == 1


def test_unset_numbers_take_their_defaults() -> None:
    found = valid([1], max_tokens=5, seed=7).sampling

    assert found == Sampling(max_tokens=5, seed=7, stop_token_ids=(2, 3))


def test_a_seed_is_drawn_when_none_is_given_and_kept_when_it_is_zero() -> None:
    assert valid([1]).sampling.seed != valid([1]).sampling.seed
    assert valid([1], seed=0).sampling.seed == 0


def test_the_models_end_tokens_stop_unless_told_not_to() -> None:
    assert valid([1], stop_token_ids=[9, 2]).sampling.stop_token_ids == (9, 2, 3)
    assert valid([1], stop_token_ids=[9], ignore_eos=True).sampling.stop_token_ids == (9,)


def test_stop_strings_need_a_tokenizer() -> None:
    bare = Limits("m", vocab_size=100, max_model_len=50, eos_token_ids=(), has_tokenizer=False)

    with pytest.raises(InvalidRequestError, match="tokenizer"):
        valid([1], bare, stop_strings=["x"])


def test_only_validation_makes_valid_requests() -> None:
    with pytest.raises(AssertionError):
        ValidRequest(np.array([1], dtype=np.int32), b"", Sampling(max_tokens=1), (), object())


def test_a_valid_prompt_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        valid([1, 2]).prompt_T[0] = 5


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_packed_ids_of_a_broken_length_are_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{length} bytes"):
        read_packed_ids(b"x" * length)


def test_another_model_is_unknown() -> None:
    check_model("", LIMITS)
    check_model("m", LIMITS)
    with pytest.raises(UnknownModelError, match="'n'"):
        check_model("n", LIMITS)
