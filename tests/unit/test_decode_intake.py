from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvrelay.core.errors import InvalidRequestError, LayoutMismatchError, ServeError, UnavailableError
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Incarnation, Sampling
from kvrelay.decode_node.intake import Demand, Limits, judge
from kvrelay.decode_node.requests import Ask
from kvrelay.kv_transfer.values import Request

NODE = Incarnation("decode-0", 7)
LAYOUT = PageLayout(num_layers=2, latent_width=8, rope_width=4, dtype="float32", model_id="m", block_tokens=64)
LIMITS = Limits(max_model_tokens=1000, vocab_size=256, cache_window_tokens=None)
ASK = Ask(
    request=Request("r", 1),
    node=NODE,
    holder=Incarnation("router", 5),
    writer=Incarnation("prefill-0", 9),
    ring_size=2,
    prompt_T=np.arange(200, dtype=np.int32),
    num_sent_tokens=0,
    sampling=Sampling(max_tokens=10),
    fingerprint=LAYOUT.fingerprint,
    prefix_seed=b"seed",
    timeout_s=10.0,
)


def judged(ask: Ask, limits: Limits = LIMITS) -> Demand:
    return asyncio.run(judge(ask, node=NODE, layout=LAYOUT, limits=limits))


def test_a_good_request_needs_its_tokens_and_names_its_full_blocks() -> None:
    demand = judged(ASK)
    assert (demand.prompt_tokens, demand.max_tokens) == (200, 10)
    assert demand.hashes is not None
    assert len(demand.hashes) == 3


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (replace(ASK, node=Incarnation("decode-0", 8)), UnavailableError, "not decode-0@0000000000000008"),
        (replace(ASK, fingerprint=b"other"), LayoutMismatchError, "layout 6f74686572"),
        (replace(ASK, fingerprint=replace(LAYOUT, latent_format="fp8").fingerprint), LayoutMismatchError, "layout"),
        (replace(ASK, request=Request("", 1)), InvalidRequestError, "no id"),
        (replace(ASK, ring_size=0), InvalidRequestError, "ring size 0"),
        (replace(ASK, ring_size=65), InvalidRequestError, "ring size 65"),
        (replace(ASK, prompt_T=np.array([], np.int32)), InvalidRequestError, "empty"),
        (replace(ASK, prompt_T=np.array([3, 256], np.int32)), InvalidRequestError, "256 is outside the vocabulary"),
        (replace(ASK, num_sent_tokens=201), InvalidRequestError, "201 sent tokens"),
        (replace(ASK, sampling=Sampling(max_tokens=801)), InvalidRequestError, "200 prompt tokens and 801 .* 1000"),
        (replace(ASK, sampling=Sampling(1, logprobs=2**32 - 1)), InvalidRequestError, "logprobs is 4294967295; .* 20"),
        (replace(ASK, sampling=Sampling(1, temperature=float("nan"))), InvalidRequestError, "temperature is nan"),
        (replace(ASK, sampling=Sampling(1, top_p=0.0)), InvalidRequestError, "top_p is 0.0"),
        (replace(ASK, sampling=Sampling(1, stop_token_ids=(1,) * 513)), InvalidRequestError, "513 entries; .* 512"),
        (replace(ASK, prompt_T=np.zeros(1000, np.int32), sampling=Sampling(max_tokens=0)), InvalidRequestError, "1000"),
    ],
)
def test_a_refusal_names_what_is_wrong(ask: Ask, error: type[ServeError], text: str) -> None:
    with pytest.raises(error, match=text):
        judged(ask)


def test_no_wanted_number_of_tokens_means_all_that_fit() -> None:
    assert judged(replace(ASK, sampling=Sampling(max_tokens=0))).max_tokens == 800


def test_a_request_beyond_the_cache_window_has_no_block_names() -> None:
    limits = replace(LIMITS, cache_window_tokens=209)
    assert judged(ASK, limits).hashes is None
    assert judged(replace(ASK, sampling=Sampling(max_tokens=9)), limits).hashes is not None


def test_a_request_without_a_tenants_seed_has_no_block_names() -> None:
    assert judged(replace(ASK, prefix_seed=b"")).hashes is None
