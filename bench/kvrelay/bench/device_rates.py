"""What the device can do at best, measured in the run that is judged by it, and the floors that follow for a shape.

Shapes in this file: H heads, T tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.model.config import ModelConfig
from kvrelay.model.tensors import expected_tensors, is_router

_COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
_ROUNDS = 10
_SUSTAINED_S = {"cuda": 1.0, "cpu": 0.1}


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does at best, as measured."""

    copy_bytes_per_s: float  # device memory, read plus written
    matmul_flop_per_s: float  # a large square product of random numbers in the model's dtype
    sustained_flop_per_s: float  # the same after a second of it: a GPU lowers its clock to stay within its power


def short_name(device: torch.device) -> str:
    """Return what result files call a device: the model of a GPU, or cpu."""
    return torch.cuda.get_device_name(device).split()[-1].lower() if device.type == "cuda" else "cpu"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the wall time of some work, the device's part included."""
    synchronize(device)
    began_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began_s


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the rates of a device; medians of several rounds after a warm-up."""
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    size = _MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)

    def products() -> None:
        for _ in range(_ROUNDS):
            torch.mm(left, right, out=product)

    products()
    target.copy_(source)
    copy_s = statistics.median(timed_s(lambda: target.copy_(source), device) for _ in range(_ROUNDS))
    matmul_s = statistics.median(timed_s(products, device) for _ in range(3)) / _ROUNDS
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < _SUSTAINED_S[device.type]:
        sustained_s = timed_s(products, device) / _ROUNDS
    return Rates(2 * source.numel() / copy_s, 2 * size**3 / matmul_s, 2 * size**3 / sustained_s)


def step_weight_bytes(config: ModelConfig, *, batch: int, number_bytes: int, same_experts: bool) -> float:
    """Return the bytes of weights that one decode step must read.

    Args:
        same_experts: all tokens go to the same experts; else to evenly random ones, and the expected number is taken.
    """
    moe = config.moe
    total = 0.0
    for name, shape in expected_tensors(config).items():
        size = float(torch.Size(shape).numel()) * (4 if is_router(name) else number_bytes)
        if name == "model.embed_tokens.weight":
            size = batch * config.hidden_size * number_bytes
        if ".mlp.experts." in name:
            assert moe is not None
            share = moe.experts_per_token / moe.num_experts
            size *= share if same_experts else 1 - (1 - share) ** batch
        total += size
    return total


def step_cache_bytes(config: ModelConfig, *, lengths: list[int], number_bytes: int) -> int:
    """Return the bytes of latents that one decode step must read."""
    row_width = config.kv_lora_rank + config.rope_width
    return sum(lengths) * config.num_layers * row_width * number_bytes


def prefill_flop(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """Return (matrix products, causal attention) of a prompt; the vocabulary's product is for one token."""
    moe = config.moe
    per_token = 0.0
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1 or "embed_tokens" in name or name == "lm_head.weight":
            continue
        size = float(torch.Size(shape).numel())
        if ".mlp.experts." in name:
            assert moe is not None
            size *= moe.experts_per_token / moe.num_experts
        per_token += 2 * size
    heads_flop = config.num_heads * (config.key_width + config.value_width)  # times T^2: causal halves the products
    return per_token * tokens, heads_flop * float(tokens) ** 2 * config.num_layers
