"""Attention whose last wave of work would leave most of a device idle.

A kernel that gives each processor one tile of queries at a time, with all their keys, ends in waves: 4,097 tiles on
132 processors take 32 times as long as one, though 31.04 would do. The last queries are taken apart then, their keys
cut into segments that are attended side by side and joined.

Shapes in this file: T query tokens, U of them apart, S keys, G segments of keys, N heads, K query/key width,
V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_TOKENS = 128
MIN_SEGMENT_TOKENS = 2048  # below, what surrounds a tile's products is felt
# What a second launch, the join and the copy behind it cost, in key tokens of a tile.
OVERHEAD_TOKENS = 1024

Attended = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LastWave:
    num_queries: int  # the last ones, which are attended apart
    num_segments: int  # of their keys, all of one length


def last_wave(num_queries: int, num_heads: int, num_keys: int, processors: int) -> LastWave | None:
    """Return what to attend apart, or None where that saves nothing."""
    blocks = -(-num_queries // TILE_TOKENS)
    waves, over = divmod(blocks * num_heads, processors)
    if not waves or not over:
        return None
    apart = -(-over // num_heads)  # whole blocks of queries, of all heads
    best, saved_most = None, OVERHEAD_TOKENS
    for segments in range(2, num_keys // MIN_SEGMENT_TOKENS + 1):
        if num_keys % segments:
            continue
        waves_apart = -(-apart * num_heads * segments // processors)
        saved = num_keys - waves_apart * (num_keys // segments)
        if saved > saved_most:
            best, saved_most = segments, saved
    if best is None:
        return None
    return LastWave(num_queries - (blocks - apart) * TILE_TOKENS, best)


def attend_last_wave_apart(
    batched: Callable[..., Attended], q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, wave: LastWave, *, scale: float
) -> Attended:
    """Return (out_TNV, lse_TN) of all queries over all keys.

    Args:
        batched: attends [batch, ...] queries, keys and values; returns (out [batch, T, N, V], lse [batch, T, N]).
    """
    first = len(q_TNK) - wave.num_queries
    out_1TNV, lse_1TN = batched(q_TNK[None, :first], k_SNK[None], v_SNV[None], scale=scale, causal=False)
    q_GUNK = q_TNK[first:].expand(wave.num_segments, -1, -1, -1).contiguous()
    k_GSNK, v_GSNV = (x.view(wave.num_segments, -1, *x.shape[1:]) for x in (k_SNK, v_SNV))
    out_GUNV, lse_GUN = batched(q_GUNK, k_GSNK, v_GSNV, scale=scale, causal=False)
    lse_UN = lse_GUN.logsumexp(0)
    out_UNV = (out_GUNV * (lse_GUN - lse_UN).exp()[..., None]).sum(0).to(out_1TNV.dtype)
    return torch.cat((out_1TNV[0], out_UNV)), torch.cat((lse_1TN[0], lse_UN))
