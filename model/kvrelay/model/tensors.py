"""Which tensors a checkpoint of a given config holds, by name and shape: the list that loading is judged against."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvrelay.model.config import ModelConfig

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return every tensor that must be there. Linear weights are [out, in]."""
    hidden = config.hidden_size
    names: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        names.update((f"model.layers.{layer}.{name}", shape) for name, shape in _layer(config, layer))
    return names


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from ((f"self_attn.{name}", shape) for name, shape in _attention(config))
    if config.moe is None or not config.is_moe_layer(layer):
        yield from _mlp("mlp", hidden, config.intermediate_size)
        return
    yield "mlp.gate.weight", (config.moe.num_experts, hidden)
    if config.moe.routing.value == "noaux_tc":
        yield "mlp.gate.e_score_correction_bias", (config.moe.num_experts,)
    for expert in range(config.moe.num_experts):
        yield from _mlp(f"mlp.experts.{expert}", hidden, config.moe.expert_width)
    if config.moe.shared_width:
        yield from _mlp("mlp.shared_experts", hidden, config.moe.shared_width)


def _attention(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, latent = config.hidden_size, config.kv_lora_rank
    if config.q_lora_rank is None:
        yield "q_proj.weight", (config.num_heads * config.key_width, hidden)
    else:
        yield "q_a_proj.weight", (config.q_lora_rank, hidden)
        yield "q_a_layernorm.weight", (config.q_lora_rank,)
        yield "q_b_proj.weight", (config.num_heads * config.key_width, config.q_lora_rank)
        if config.attention_bias:
            yield "q_a_proj.bias", (config.q_lora_rank,)
    yield "kv_a_proj_with_mqa.weight", (latent + config.rope_width, hidden)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (config.num_heads * (config.nope_width + config.value_width), latent)
    yield "o_proj.weight", (hidden, config.num_heads * config.value_width)
    if config.attention_bias:
        yield "kv_a_proj_with_mqa.bias", (latent + config.rope_width,)
        yield "o_proj.bias", (hidden,)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def is_router(name: str) -> bool:
    """True for tensors that stay fp32 in memory, because routing is decided in fp32."""
    return ".mlp.gate." in name


def loaded_bytes(config: ModelConfig, number_bytes: int, *, device_type: str = "cpu") -> int:
    """Return the bytes of the weights in memory, `number_bytes` each but for routers.

    A GPU has the weights that expand cached rows, and the last ones of shared experts, a second time in another order.
    """
    total = sum(
        math.prod(shape) * (4 if is_router(name) else number_bytes) for name, shape in expected_tensors(config).items()
    )
    if device_type == "cpu":
        return total
    expand = config.num_heads * (config.key_width + config.value_width) * (config.kv_lora_rank + config.rope_width)
    moe_layers = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    shared = config.hidden_size * config.moe.shared_width if config.moe is not None else 0
    return total + (config.num_layers * expand + moe_layers * shared) * number_bytes
