"""Reading config.json: both spellings, harmless keys ignored, everything that changes the result refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.errors import ModelLoadError
from kvrelay.kernels.rope_spec import RopeKind
from kvrelay.model.config import ModelConfig, load_config

# As DeepSeek publishes V3, the keys that matter and those that do not.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2: dict[str, Any] = V3 | {
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "pretraining_tp": 1,
}


def read(tmp_path: Path, config: dict[str, Any], max_model_len: int | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_config(tmp_path, max_model_len)


def test_the_published_v3_config_is_understood(tmp_path: Path) -> None:
    config = read(tmp_path, V3)

    assert (config.num_layers, config.num_heads, config.kv_lora_rank, config.rope_width) == (61, 128, 512, 64)
    assert config.moe is not None
    assert not config.is_moe_layer(2)
    assert config.is_moe_layer(3)
    assert config.fp8_blocks
    assert config.rope.kind is RopeKind.YARN
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.eos_token_ids == (1,)
    assert config.cache_window_tokens is None


def test_both_spellings_mean_the_same(tmp_path: Path) -> None:
    newer = {key: value for key, value in V3.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    newer |= {
        "dtype": "bfloat16",
        "head_dim": 64,
        "qk_head_dim": 192,
        "rope_interleave": True,
        "rope_parameters": {**V3["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0},
    }

    assert read(tmp_path, newer) == read(tmp_path, V3)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (V3, {"model_type": "llama"}, "model_type"),
        (V3, {"model_type": "deepseek_v32"}, "model_type"),
        (V3, {"hidden_act": "gelu"}, "hidden_act"),
        (V3, {"index_topk": 2048}, "index_topk"),
        (V3, {"index_n_heads": 64}, "index_n_heads"),
        (V3, {"sliding_window": 4096}, "sliding_window"),
        (V3, {"attn_sinks": 4}, "attn_sinks"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"head_dim": 128}, "head_dim"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (V3, {"rope_scaling": {"type": "longrope", "factor": 4}}, "longrope"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 4, "low_freq_factor": 1}}, "low_freq_factor"),
        (V3, {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4}}, "rope_type"),
        (V3, {"rope_scaling": {"type": "linear"}}, "factor"),
        (V3, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method"),
        (V3, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size"),
        (V3, {"torch_dtype": "float8"}, "dtype"),
        (V3, {"hidden_size": "7168"}, "hidden_size"),
        (V3, {"hidden_size": 0}, "hidden_size"),
        (V3, {"qk_rope_head_dim": 63, "head_dim": 63}, "qk_rope_head_dim"),
        (V3, {"kv_lora_rank": None}, "kv_lora_rank"),
        (V3, {"n_group": 7}, "n_group"),
        (V3, {"topk_group": 9}, "topk_group"),
        (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (V3, {"eos_token_id": "</s>"}, "eos_token_id"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (V2, {"rope_interleave": False}, "rope_interleave"),
        (V2, {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_changes_the_result_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    read(tmp_path, base)

    with pytest.raises(ModelLoadError, match=named):
        read(tmp_path, base | change)


@pytest.mark.parametrize(
    "change", [{"some_feature": None}, {"some_feature": False}, {"_note": "x"}, {"mlp_bias": False}]
)
def test_a_key_that_is_switched_off_or_private_is_harmless(tmp_path: Path, change: dict[str, Any]) -> None:
    assert read(tmp_path, V3 | change) == read(tmp_path, V3)


def test_null_experts_mean_a_dense_model(tmp_path: Path) -> None:
    config = read(tmp_path, V3 | {"n_routed_experts": None})

    assert config.moe is None
    assert not config.is_moe_layer(60)


def test_the_generation_config_has_the_later_word_on_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))

    assert read(tmp_path, V3).eos_token_ids == (7, 8)


def test_a_length_beyond_what_rope_covers_is_refused_except_for_dynamic_rope(tmp_path: Path) -> None:
    assert read(tmp_path, V3).max_model_len == 163840
    assert read(tmp_path, V3, max_model_len=1000).max_model_len == 1000
    with pytest.raises(ModelLoadError, match="200000 is longer than the 163840"):
        read(tmp_path, V3, max_model_len=200_000)

    dynamic = V3 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert read(tmp_path, dynamic, max_model_len=1_000_000).max_model_len == 1_000_000
    assert read(tmp_path, dynamic).cache_window_tokens == 163840


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_config_that_is_no_object_is_refused_by_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path)
