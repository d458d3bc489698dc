"""A ring over two GPUs feeds a decode node on the second of them: three processes, as close to fp32 as one.

The recorded tokens through the same three processes are in test_split_on_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.cluster import Spec, running
from kvrelay.bench import random_checkpoint
from kvrelay.bench.random_model import V2_LITE
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.single import SingleEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]
ON_THE_SECOND = {"KVRELAY_DECODE_DEVICE": "cuda:1"}
WIDE = replace(V2_LITE, num_layers=4)  # a dense layer and three of experts, at the real widths
NEW_TOKENS = 24


def test_half_precision_at_real_widths_is_as_close_to_fp32_as_one_process_is(tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path, WIDE, device=torch.device("cuda", 0))
    prompt = np.random.default_rng(5).integers(WIDE.vocab_size, size=1500).tolist()
    with running(
        Spec(tmp_path, ring_size="2", chunk_tokens=512, dtype="bfloat16", environ=ON_THE_SECOND)
    ) as cluster:  # fmt: skip
        scored = cluster.generate(prompt, max_tokens=1, prompt_logprobs=True, ignore_eos=True)
        answer = cluster.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True)
        cluster.assert_settled()
    forced = prompt + answer.token_ids[:-1]
    exact_logits, exact = one_process(tmp_path, "float32", prompt, forced)
    half_logits, half = one_process(tmp_path, "bfloat16", prompt, forced)

    ours = torch.tensor(scored.prompt_logprobs)
    assert distance(ours, exact) <= 1.2 * distance(half, exact)
    top = exact_logits.topk(2).values
    is_clear = top[:, 0] - top[:, 1] > 4 * (half_logits - exact_logits).abs().max(-1).values
    assert is_clear.any(), "no token has a margin: the test says nothing"
    tokens = torch.tensor(answer.token_ids)
    assert torch.equal(tokens[is_clear], exact_logits.argmax(-1)[is_clear])


def one_process(folder: Path, dtype: str, prompt: list[int], forced: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits that choose each new token when all earlier ones are given, and the prompt's
    log-probabilities."""
    model = load_model(folder, dtype=dtype, device=torch.device("cuda", 0), max_model_len=2048)
    engine = SingleEngine(model, LatentPool(model.layout(block_tokens=64), 64, model.device))
    logprobs = engine.prompt_logprobs(prompt)
    session = engine.open(len(forced))
    logits = engine.prefill(session, forced, all_logits=True)[len(prompt) - 1 :]
    return logits.float().cpu(), logprobs.float().cpu()


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).pow(2).mean().sqrt())
