"""Prompts and the answers they must get: the oracle's recordings, and others computed by one process."""

from __future__ import annotations

from functools import lru_cache

from cluster.cluster import Spec, vocab_size
from cluster.one_process import greedy_alone
from oracle_data import oracle_folder, recording

ORACLE = "v3_noaux"
FOLDER = oracle_folder(ORACLE)
VOCAB = vocab_size(FOLDER)
SPEC = Spec(
    FOLDER, ring_size="1,2", prefill=2, decode=2, chunk_tokens=128, pool_pages=400,
    environ={
        "KVRELAY_PREFILL_PULL_TIMEOUT_S": "10",
        "KVRELAY_PREFILL_GIVE_WAY_MS": "0.001",  # these chunks take milliseconds
    },
)  # fmt: skip


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Return a prompt that only this seed has."""
    base = recording(ORACLE, 1500).prompt
    return [
        (base[place % 1500] + seed * 7 + place * (seed % 13) + place // 1500) % (VOCAB - 1)
        for place in range(num_tokens)
    ]


@lru_cache(maxsize=4096)
def golden(seed: int, num_tokens: int, num_output: int) -> tuple[int, ...]:
    """Return the greedy tokens after a prompt, as one process finds them."""
    return tuple(greedy_alone(FOLDER, prompt(seed, num_tokens), num_tokens=num_output))
