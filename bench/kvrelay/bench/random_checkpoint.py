"""A checkpoint folder of a known shape with random weights, so that the program's own loader makes the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvrelay.bench.random_model import RandomTensors
from kvrelay.model.checkpoint import DTYPES
from kvrelay.model.checkpoint_files import INDEX_NAME
from kvrelay.model.config import ModelConfig
from kvrelay.model.tensors import expected_tensors

_WRITERS = 4


def write(folder: Path, config: ModelConfig, *, device: torch.device, seed: int = 0) -> None:
    """Write config.json and one safetensors file per layer, in the config's dtype.

    Args:
        device: makes the numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = _parts(config)
    names = {f"model-{number:05}.safetensors": part for number, part in enumerate(parts)}

    def write_part(file: str, tensors: Sequence[str], part_seed: int) -> None:
        generator = torch.Generator(device).manual_seed(part_seed)
        source = RandomTensors(expected_tensors(config), device, generator, same_experts=False, dummy=False)
        dtype = DTYPES[config.checkpoint_dtype]
        save_file({name: source.take(name, dtype).cpu() for name in tensors}, folder / file)

    with ThreadPoolExecutor(_WRITERS) as pool:
        seeds = range(seed * len(parts), (seed + 1) * len(parts))
        for done in [pool.submit(write_part, *one, number) for one, number in zip(names.items(), seeds, strict=True)]:
            done.result()
    index = {"weight_map": {name: file for file, part in names.items() for name in part}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=1))


def _parts(config: ModelConfig) -> list[list[str]]:
    """Return the tensors of each file: one file per layer, and one for what belongs to none."""
    parts: list[list[str]] = [[] for _ in range(config.num_layers + 1)]
    for name in expected_tensors(config):
        parts[int(name.split(".")[2]) if name.startswith("model.layers.") else -1].append(name)
    return parts


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return what a DeepSeek V2 checkpoint's config.json says of this shape."""
    moe, rope = config.moe, config.rope
    assert moe is not None, "the known shapes have experts"
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.nope_width,
        "qk_rope_head_dim": config.rope_width,
        "v_head_dim": config.value_width,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "moe_intermediate_size": moe.expert_width,
        "n_shared_experts": moe.shared_width // moe.expert_width,
        "routed_scaling_factor": moe.weight_scale,
        "norm_topk_prob": moe.normalise_weights,
        "first_k_dense_replace": moe.first_moe_layer,
        "topk_method": moe.routing.value,
        "rope_theta": rope.theta,
        "rope_scaling": {
            "type": rope.kind.value,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_tokens,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        },
        "max_position_embeddings": config.max_position_embeddings,
        "torch_dtype": config.checkpoint_dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
