"""Kernels in Triton that only move bytes, over the device's copy rate."""

from __future__ import annotations

from typing import Any

import torch

from kvrelay.bench.kernel_timing import recorded, side_by_side
from kvrelay.kernels import checksum, triton_checksum
from kvrelay.kernels.pieces import Pieces
from kvrelay.kernels.triton_merge import merge
from kvrelay.kernels.triton_pack import pack_pieces

LAYERS, PAGES, TAKEN = 27, 4096, 1024
PAGE_SHAPE = (64, 576)


def moves(device: torch.device, *, copy_bytes_per_s: float, repetitions: int) -> dict[str, Any]:
    """Return, per kernel, bytes read plus written per second over the copy rate."""
    pool = torch.empty(LAYERS, PAGES, *PAGE_SHAPE, dtype=torch.bfloat16, device=device).normal_()
    packed = torch.empty(LAYERS, TAKEN, *PAGE_SHAPE, dtype=torch.bfloat16, device=device)
    page_bytes = packed[0, 0].numel() * packed.element_size()
    scattered = torch.randperm(LAYERS * PAGES)[: LAYERS * TAKEN].tolist()
    pieces = Pieces.of([(page * page_bytes, page_bytes) for page in scattered], device)
    pool_words, packed_words = (rows.view(-1).view(torch.int64) for rows in (pool, packed))
    out, lse = torch.randn(32_768, 16, 128, device=device), torch.randn(32_768, 16, device=device)
    half = out.to(torch.bfloat16)
    packed_bytes = packed.numel() * packed.element_size()
    works = {
        "pack": recorded(lambda: pack_pieces(pool_words, pieces, packed_words)),
        "checksum_scattered": recorded(lambda: triton_checksum.piece_sum(pool_words, pieces)),
        "checksum": recorded(lambda: checksum.checksum(packed)),
        "merge": recorded(lambda: merge(out, lse, half, lse, into=out)),
    }
    moved_bytes = {
        "pack": 2 * packed_bytes,
        "checksum": packed_bytes,
        "checksum_scattered": packed_bytes,
        "merge": out.numel() * 10,
    }
    times = side_by_side(works, repetitions=repetitions)
    return {
        name: time.as_json() | {"rate_over_copy": round(moved_bytes[name] / time.median_s / copy_bytes_per_s, 4)}
        for name, time in times.items()
    }
