"""`kvrelay bench memory`: the peak of device memory in a long chunked prefill, predicted beforehand and measured.

What a chunk needs does not depend on how the rows before it came about, and grows with their number only up to one
block of them. So the first chunk and the last one, over random earlier rows, have the peak of the whole prompt.

Shapes in this file: T tokens of a chunk, S earlier rows of a block, D hidden, H heads, K key width, V value width,
W latent row, A (token, expert) pairs, I expert width.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.bench import report
from kvrelay.bench.device_rates import short_name, timed_s
from kvrelay.bench.random_model import SHAPES, random_model
from kvrelay.core.errors import SettingsError
from kvrelay.core.layout import DTYPE_BYTES
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.config import ModelConfig
from kvrelay.model.prefill_step import PREFIX_BLOCK_TOKENS, prefill_forward
from kvrelay.model.tensors import loaded_bytes
from kvrelay.model.transformer import FEED_FORWARD_BLOCK_TOKENS

_FP32 = DTYPE_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes of each kind that a prefill has at once."""

    weights: int
    pool: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.temporaries


def predict(
    config: ModelConfig, *, pool_bytes: int, chunk_tokens: int, number_bytes: int, paused_chunks: int = 0
) -> Prediction:
    """Return what a GPU will hold at the peak of a prefill in chunks of `chunk_tokens`.

    Args:
        paused_chunks: others of as many tokens that keep their hidden states and rope tables meanwhile.
    """
    heads, row_width = config.num_heads, config.kv_lora_rank + config.rope_width
    expanded = heads * (config.key_width + config.value_width)
    # A layer keeps its input, its first product, its rows, and the result of its attention.
    kept = config.hidden_size + heads * config.key_width + 2 * row_width
    kept_bytes = chunk_tokens * (kept * number_bytes + heads * (config.value_width * _FP32 + _FP32))
    block_bytes = PREFIX_BLOCK_TOKENS["cuda"] * row_width * number_bytes
    # While earlier rows are attended: their keys and values, and what comes of them, which may be put together.
    partial = chunk_tokens * heads * (2 * config.value_width * number_bytes + _FP32)
    attention = PREFIX_BLOCK_TOKENS["cuda"] * expanded * number_bytes + partial
    paused_bytes = paused_chunks * chunk_tokens * (config.hidden_size * number_bytes + 2 * config.rope_width * _FP32)
    temporaries = (
        paused_bytes
        + kept_bytes
        + block_bytes
        + max(attention, _feed_forward_bytes(config, chunk_tokens, number_bytes))
    )
    return Prediction(loaded_bytes(config, number_bytes, device_type="cuda"), pool_bytes, temporaries)


def _feed_forward_bytes(config: ModelConfig, tokens: int, number_bytes: int) -> int:
    """Return the temporaries in an MoE layer, or in a dense one: the attention's output, the sum with it and its norm,
    and a block that is widened."""
    block = min(tokens, FEED_FORWARD_BLOCK_TOKENS["cuda"])
    widened = block * 3 * config.intermediate_size
    if config.moe is not None:
        pairs = block * config.moe.experts_per_token
        widened = max(widened, pairs * (config.hidden_size + 2 * config.moe.expert_width))
    return (3 * tokens * config.hidden_size + widened) * number_bytes


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    if not torch.cuda.is_available():
        raise SettingsError("this bench measures the memory of a CUDA device, and there is none")
    result = measure(
        SHAPES[options.shape],
        prompt_tokens=options.prompt_tokens,
        chunk_tokens=options.chunk_tokens,
        paused_chunks=options.paused_chunks,
    )
    report.tell(result, out=options.out, device=short_name(torch.device("cuda")), bench="memory")
    return 0


@torch.inference_mode()
def measure(config: ModelConfig, *, prompt_tokens: int, chunk_tokens: int, paused_chunks: int) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_allocated(device)
    model = random_model(config, device, torch.bfloat16)
    layout = model.layout(block_tokens=64)
    pool = LatentPool(layout, layout.pages_for(prompt_tokens), device)
    for layer in range(layout.num_layers):
        pool.layer(layer).normal_()
    slots = torch.randperm(pool.num_pages, device=device)[:, None] * 64 + torch.arange(64, device=device)
    slots = slots.flatten()[:prompt_tokens]
    predicted = predict(
        config, pool_bytes=pool.num_bytes, chunk_tokens=chunk_tokens, number_bytes=2, paused_chunks=paused_chunks
    )
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    last = (prompt_tokens - 1) // chunk_tokens * chunk_tokens
    paused = [
        (torch.empty(chunk_tokens, config.hidden_size, dtype=torch.bfloat16, device=device),
         torch.empty(chunk_tokens, 2 * config.rope_width, device=device))
        for _ in range(paused_chunks)
    ]  # fmt: skip
    seconds = []
    for start in (0, last):
        ids = torch.randint(config.vocab_size, (min(chunk_tokens, prompt_tokens - start),), device=device)

        def chunk(ids: torch.Tensor = ids, start: int = start) -> None:
            hidden = prefill_forward(model, pool, ids, slots=slots, start=start, ntk_tokens=prompt_tokens)
            model.logits(hidden[-1:])

        seconds.append(timed_s(chunk, device))
    measured = torch.cuda.max_memory_allocated(device) - before
    del paused
    return {
        "prompt_tokens": prompt_tokens, "chunk_tokens": chunk_tokens, "chunks_run": "first and last",
        "predicted_gib": round(predicted.total / 2**30, 3), "measured_gib": round(measured / 2**30, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved(device) / 2**30, 3),
        "predicted_over_measured": round(predicted.total / measured, 4),
        "weights_gib": round(predicted.weights / 2**30, 3), "pool_gib": round(predicted.pool / 2**30, 3),
        "temporaries_gib": round(predicted.temporaries / 2**30, 3), "chunk_s": [round(one, 3) for one in seconds],
    }  # fmt: skip
