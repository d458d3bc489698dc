"""Queries that would leave most processors idle in the last wave are attended apart, and nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrelay.kernels import reference
from kvrelay.kernels.last_wave import LastWave, attend_last_wave_apart, last_wave


def waves(queries: int, heads: int, processors: int) -> int:
    """Return how many tiles over all keys a call takes one after the other."""
    return -(-(-(-queries // 128) * heads) // processors)


def test_a_last_wave_of_a_few_tiles_is_cut_along_its_keys() -> None:
    # 4,096 tiles on 132 processors: 31 waves and 4 tiles.
    assert last_wave(32_768, 16, 98_304, 132) == LastWave(128, 8)
    # The last block of queries may be a part of one.
    assert last_wave(32_700, 16, 98_304, 132) == LastWave(60, 8)


@pytest.mark.parametrize(
    ("queries", "heads", "keys"),
    [
        (33_792, 16, 98_304),  # whole waves
        (1024, 16, 98_304),  # less than one
        (32_768, 16, 2048),  # keys too few to cut
        (32_768, 16, 98_303),  # keys that no number of segments divides
    ],
)
def test_nothing_is_apart_where_that_saves_nothing(queries: int, heads: int, keys: int) -> None:
    assert last_wave(queries, heads, keys, 132) is None


@pytest.mark.parametrize("queries", range(1280, 33_000, 997))
def test_what_is_apart_always_shortens_the_whole(queries: int) -> None:
    heads, keys, processors = 16, 65_536, 132
    wave = last_wave(queries, heads, keys, processors)
    if wave is not None:
        rest = waves(queries - wave.num_queries, heads, processors) * keys
        segment = keys // wave.num_segments
        apart = waves(wave.num_queries, heads * wave.num_segments, processors) * segment
        assert rest + apart < waves(queries, heads, processors) * keys


def test_the_parts_make_one_softmax() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((20, 3, 8), (24, 3, 8), (24, 3, 6)))

    def batched(q_BTNK: Tensor, k_BSNK: Tensor, v_BSNV: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        one = [
            reference.attend_block(*each, scale=scale, causal=causal)
            for each in zip(q_BTNK, k_BSNK, v_BSNV, strict=True)
        ]
        return torch.stack([out for out, _ in one]), torch.stack([lse for _, lse in one])

    found = attend_last_wave_apart(batched, q, k, v, LastWave(5, 4), scale=0.5)

    torch.testing.assert_close(found, reference.attend_block(q, k, v, scale=0.5, causal=False), atol=1e-5, rtol=1e-5)
