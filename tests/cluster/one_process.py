"""The same model in this process, for what a cluster must answer when there is no recorded reference."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from kvrelay.core.types import Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.single import SingleEngine

NUM_PAGES = 64


@lru_cache(maxsize=2)
def engine(folder: Path, latent_format: str = "model") -> SingleEngine:
    device = torch.device("cpu")
    model = load_model(folder, dtype="float32", device=device, max_model_len=None)
    layout = model.layout(block_tokens=64, latent_format=latent_format)
    return SingleEngine(model, LatentPool(layout, NUM_PAGES, device))


def greedy_alone(folder: Path, prompt: list[int], *, num_tokens: int, latent_format: str = "model") -> list[int]:
    """Return the greedy tokens that follow a prompt of at most 4,000 tokens."""
    sampled = engine(folder, latent_format).generate(prompt, Sampling(max_tokens=num_tokens), chunk_tokens=4096)
    return [one.token_id for one in sampled]
