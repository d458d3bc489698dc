"""A fleet whose latents are in 8 bits: split over nodes, rings and caches it answers as one process with such rows."""

from __future__ import annotations

import random

from cluster.cluster import Cluster, Spec, vocab_size
from cluster.one_process import greedy_alone
from kvrelay.core.layout import PageLayout
from oracle_data import oracle_folder

SPEC = Spec(oracle_folder("v3_noaux"), ring_size="1,2", chunk_tokens=100, latent_format="fp8")
LAYOUT = PageLayout(
    num_layers=4, latent_width=32, rope_width=8, dtype="float32", model_id="-", block_tokens=64, latent_format="fp8"
)


def some_ids(seed: int, num_tokens: int) -> list[int]:
    rng, vocab = random.Random(seed), vocab_size(SPEC.model)
    return [rng.randrange(vocab - 1) for _ in range(num_tokens)]


def test_all_nodes_say_that_their_rows_are_in_8_bits(cluster: Cluster) -> None:
    nodes = cluster.nodes()

    assert {node.latent_format for node in nodes} == {"fp8"}
    assert len({node.layout_fingerprint for node in nodes}) == 1


def test_answers_are_those_of_one_process_with_such_rows(cluster: Cluster) -> None:
    for seed, length in enumerate((1, 65, 333, 1500)):
        prompt = some_ids(seed, length)
        expected = greedy_alone(SPEC.model, prompt, num_tokens=16, latent_format="fp8")

        first, again = (cluster.generate(prompt, max_tokens=16) for _ in range(2))

        assert first.token_ids == again.token_ids == expected
        assert again.usage.resident_tokens == length // 64 * 64  # whichever ring computed the rest


def test_a_relayed_token_has_the_bytes_of_the_format(cluster: Cluster) -> None:
    before = cluster.counter("bytes_relayed_total", role="decode")

    cluster.generate(some_ids(100, 640), max_tokens=2)

    assert cluster.counter("bytes_relayed_total", role="decode") - before == 640 * LAYOUT.row_bytes_all_layers
