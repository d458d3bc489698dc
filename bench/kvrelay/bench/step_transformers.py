"""Time to the first token and between tokens of Hugging Face's own DeepseekV2 in a known shape, for a sanity ratio.

It runs as it comes: its default attention and experts, the whole prompt in one forward pass, logits of the last token
only, then one forward pass per token over its own cache. Weights are random, and so are the experts that tokens hit.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from kvrelay.bench.device_rates import synchronize
from kvrelay.core.errors import SettingsError
from kvrelay.model.config import ModelConfig, Routing

_WARM_UP_STEPS = 3


def their_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of their configuration that make a model of our shape; rope is left as it comes."""
    moe = config.moe
    assert moe is not None, "the model of this bench has experts"
    assert moe.routing is Routing.SOFTMAX_GREEDY, "and chooses them by softmax alone"
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.nope_width,
        "qk_rope_head_dim": config.rope_width,
        "v_head_dim": config.value_width,
        "head_dim": config.rope_width,
        "first_k_dense_replace": moe.first_moe_layer,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_width // moe.expert_width,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_width,
        "norm_topk_prob": moe.normalise_weights,
        "max_position_embeddings": config.max_position_embeddings,
        "topk_method": "greedy",
    }


@torch.inference_mode()
def measure(config: ModelConfig, device: torch.device, *, prompt_tokens: int, steps: int, runs: int) -> dict[str, Any]:
    """Return medians in ms; the model is made on the device and gone afterwards.

    Raises:
        SettingsError: the library is not installed; it is no dependency of kvrelay.
    """
    if find_spec("transformers") is None:
        raise SettingsError(
            "--transformers compares with transformers, which is not installed: pip install transformers"
        )
    from transformers import AutoModelForCausalLM, DeepseekV2Config  # noqa: PLC0415 - not a dependency

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(DeepseekV2Config(**their_config(config)), dtype=dtype).eval()
    firsts_s, steps_s = [], []
    for run in range(runs + 1):
        ids = torch.randint(config.vocab_size, (1, prompt_tokens), device=device)
        synchronize(device)
        began_s = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        token = int(out.logits[0, -1].argmax())
        if run:
            firsts_s.append(time.perf_counter() - began_s)
    for step in range(_WARM_UP_STEPS + steps):
        began_s = time.perf_counter()
        out = model(torch.tensor([[token]], device=device), past_key_values=out.past_key_values, use_cache=True)
        token = int(out.logits[0, -1].argmax())
        if step >= _WARM_UP_STEPS:
            steps_s.append(time.perf_counter() - began_s)
    settings = {name: getattr(model.config, f"_{name}_implementation", None) for name in ("attn", "experts")}
    del model, out
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "version": version("transformers"), "prompt_tokens": prompt_tokens, **settings,
        "ttft_ms": round(statistics.median(firsts_s) * 1e3, 3), "step_ms": round(statistics.median(steps_s) * 1e3, 4),
    }  # fmt: skip


def beside(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return their figures with our times over theirs, from the result of `bench step` without equal experts."""
    tokens = theirs["prompt_tokens"]
    prefill = [one for one in ours["prefill"] if one["prompt_tokens"] == tokens and not one["same_experts"]]
    decode = [
        one for one in ours["decode"] if (one["batch"], one["context"], one["same_experts"]) == (1, tokens, False)
    ]
    ratios = {
        "our_ttft_over_theirs": [round(one["ttft_ms"] / theirs["ttft_ms"], 4) for one in prefill],
        "our_step_over_theirs": [round(one["step_ms"] / theirs["step_ms"], 4) for one in decode],
    }
    return dict(theirs) | {name: ratio[0] for name, ratio in ratios.items() if ratio}
