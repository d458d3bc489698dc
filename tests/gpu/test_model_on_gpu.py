"""The model on a GPU gives what it gives on a CPU."""

from __future__ import annotations

import pytest
import torch

from kvrelay.core.types import Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.single import SingleEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = torch.randint(2, 4000, (700,), generator=torch.Generator().manual_seed(3)).tolist()


def an_engine(device: str, dtype: str = "float32") -> SingleEngine:
    model = load_model(embedded_checkpoint(), dtype=dtype, device=torch.device(device))
    return SingleEngine(model, LatentPool(model.layout(block_tokens=64), 60, model.device))


@pytest.fixture(autouse=True)
def full_fp32_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("chunk_tokens", [None, 100])
def test_fp32_logits_equal_those_of_the_cpu(chunk_tokens: int | None) -> None:
    on_cpu, on_gpu = an_engine("cpu"), an_engine("cuda:0")

    expected = on_cpu.prefill(on_cpu.open(700), PROMPT, all_logits=True)
    found = on_gpu.prefill(on_gpu.open(700), PROMPT, chunk_tokens=chunk_tokens, all_logits=True)

    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), expected, atol=2e-3, rtol=0)


def test_a_ragged_batch_decodes_as_on_the_cpu() -> None:
    logits = []
    for device in ("cpu", "cuda:0"):
        engine = an_engine(device)
        prompts = [PROMPT[:length] for length in (1, 64, 700, 333, 690)]
        sessions = [engine.open(len(prompt) + 1) for prompt in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            engine.prefill(session, prompt)
        logits.append(engine.decode_step(sessions, [5, 6, 7, 8, 9]).cpu())

    torch.testing.assert_close(logits[1], logits[0], atol=2e-3, rtol=0)


def test_a_seed_names_one_text_on_both_devices() -> None:
    sampling = Sampling(max_tokens=32, temperature=1.0, top_p=0.9, seed=5)

    texts = [[token.token_id for token in an_engine(device).generate(PROMPT, sampling)] for device in ("cpu", "cuda:0")]

    assert texts[0] == texts[1]


def test_bfloat16_stays_close_to_fp32() -> None:
    whole, half = an_engine("cuda:0"), an_engine("cuda:0", "bfloat16")

    expected = whole.prefill(whole.open(700), PROMPT, all_logits=True)
    found = half.prefill(half.open(700), PROMPT, all_logits=True)

    assert found.dtype == torch.float32
    assert (found - expected).abs().median() < 0.1 * expected.std()
