"""A prefix is computed and sent once and changes no answer; requests at once do not disturb each other."""

from __future__ import annotations

import random

import pytest

from cluster.cluster import Cluster, vocab_size
from cluster.one_process import greedy_alone
from cluster.specs import RING_OF_TWO

SPEC = RING_OF_TWO
FOLDER = SPEC.model
VOCAB = vocab_size(FOLDER)
PAGE_TOKENS = 64


def some_ids(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(10_000 + seed)  # other tests of the cluster have prompts of their own
    return [rng.randrange(VOCAB - 1) for _ in range(num_tokens)]


def test_eight_clients_at_once_get_the_same_tokens_as_alone(cluster: Cluster) -> None:
    prompts = [some_ids(seed, length) for seed, length in enumerate((1, 7, 64, 100, 333, 500, 900, 1200))]
    sampling = [{"temperature": 0.8 * (n % 2), "top_p": 0.9, "seed": n, "max_tokens": 16} for n in range(8)]
    alone = [cluster.generate(prompt, **options) for prompt, options in zip(prompts, sampling, strict=True)]

    began = [cluster.start(prompt, **options) for prompt, options in zip(prompts, sampling, strict=True)]
    together = cluster.finish_all(began)

    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert all(answer.token_ids for answer in together)


def test_the_same_prompt_again_is_neither_computed_nor_sent_again(cluster: Cluster) -> None:
    prompt = some_ids(100, 640)
    first = cluster.generate(prompt, max_tokens=8)
    computed = cluster.counter("prefill_tokens_executed", role="prefill")
    second = cluster.generate(prompt, max_tokens=8)

    assert (first.usage.cached_tokens, first.usage.resident_tokens) == (0, 0)
    assert second.usage.cached_tokens == 640 - PAGE_TOKENS  # the last token is always computed
    assert second.usage.resident_tokens == 640  # decode needs nothing: a hand-off of no bytes
    assert cluster.counter("prefill_tokens_executed", role="prefill") - computed == 640 - second.usage.cached_tokens
    assert second.token_ids == first.token_ids


def test_a_longer_prompt_reuses_the_shared_prefix(cluster: Cluster) -> None:
    shared = some_ids(200, 512)
    cluster.generate(shared + some_ids(201, 50), max_tokens=4)
    longer = shared + some_ids(202, 300)

    answer = cluster.generate(longer, max_tokens=8)

    assert (answer.usage.cached_tokens, answer.usage.resident_tokens) == (512, 512)
    assert answer.token_ids == greedy_alone(FOLDER, longer, num_tokens=8)


def test_the_second_turn_of_a_chat_reuses_the_first_answer(cluster: Cluster) -> None:
    turn = some_ids(300, 200)
    first = cluster.generate(turn, max_tokens=100)
    again = turn + first.token_ids + some_ids(301, 40)

    second = cluster.generate(again, max_tokens=8)

    # Prefill has the prompt's blocks; decode also has the full blocks of its own output.
    assert second.usage.cached_tokens == 192
    assert second.usage.resident_tokens in (192, 256)
    assert second.token_ids == greedy_alone(FOLDER, again, num_tokens=8)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_prompts_around_a_page_boundary_repeat_exactly(cluster: Cluster, length: int) -> None:
    prompt = some_ids(400 + length, length)
    first = cluster.generate(prompt, max_tokens=6)
    second = cluster.generate(prompt, max_tokens=6)

    assert second.token_ids == first.token_ids
    assert second.usage.cached_tokens == (length - 1) // PAGE_TOKENS * PAGE_TOKENS
