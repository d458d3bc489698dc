"""A prefill block through each backend that can run it, beside the device's matrix products.

Shapes in this file: T tokens, N heads, K query/key width, V value width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvrelay.bench.kernel_timing import side_by_side
from kvrelay.kernels import mla_prefill

CALLS = 4  # in a row, as layers are: the host's work on one hides behind the device's on another
HEADS, KEY_WIDTH, VALUE_WIDTH = 16, 192, 128


def block(
    tokens: int, device: torch.device, *, causal: bool, matmul_flop_per_s: float, repetitions: int
) -> dict[str, Any]:
    """Return each backend's time, and the chosen one's over the best and over the matrix products' rate."""
    problem = mla_prefill.Problem("cuda", torch.bfloat16, KEY_WIDTH, VALUE_WIDTH)
    able = [backend for backend in mla_prefill.BACKENDS if backend.refuses(problem) is None and backend.name != "torch"]
    q, k = (torch.randn(tokens, HEADS, KEY_WIDTH, device=device).to(torch.bfloat16) for _ in range(2))
    up = torch.randn(tokens, HEADS, 128 + VALUE_WIDTH, device=device).to(torch.bfloat16)
    v = up[..., 128:]  # as the model's: behind the key's part of one product
    scale = KEY_WIDTH**-0.5
    works = {
        backend.name: functools.partial(_several, backend.load(), q, k, v, scale=scale, causal=causal)
        for backend in able
    }
    times = side_by_side(works, repetitions=repetitions, calls_per_work=CALLS)
    flop = 2 * (KEY_WIDTH + VALUE_WIDTH) * HEADS * tokens**2 // (2 if causal else 1)
    chosen = able[0].name
    best_s = min(time.median_s for time in times.values())
    return {
        "tokens": tokens,
        "causal": causal,
        **{
            name: time.as_json() | {"tflop_per_s": round(flop / time.median_s / 1e12, 1)}
            for name, time in times.items()
        },
        "chosen": chosen,
        "speed_over_best": round(best_s / times[chosen].median_s, 4),
        "rate_over_matmul": round(flop / times[chosen].median_s / matmul_flop_per_s, 4),
    }


def _several(attend: mla_prefill.AttendBlock, *qkv: Tensor, scale: float, causal: bool) -> None:
    for _ in range(CALLS):
        attend(*qkv, scale=scale, causal=causal)
