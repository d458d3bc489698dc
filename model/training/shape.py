"""The architecture of the embedded model, and its config.json."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a DeepSeek-V3 style model; names are those of Hugging Face's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 320
    intermediate_size: int = 640
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    train_window_tokens: int = 4096
    yarn_factor: float = 4.0

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


TINY = Shape()
# Small enough for a minute on a CPU; every code path of TINY is in it.
SMOKE = replace(
    Shape(),
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    train_window_tokens=256,
)


def hf_config(shape: Shape, *, bos: int, eos: int) -> dict[str, Any]:
    """Return config.json as DeepSeek publishes it (rope_scaling spelling)."""
    sizes = asdict(shape)
    window = sizes.pop("train_window_tokens")
    factor = sizes.pop("yarn_factor")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        **sizes,
        "num_key_value_heads": shape.num_attention_heads,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "max_position_embeddings": int(window * factor),
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": window,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
    }


def shape_of(config: dict[str, Any]) -> Shape:
    """Return the shape that hf_config() wrote."""
    yarn = config["rope_scaling"]
    sizes = {field.name: config[field.name] for field in fields(Shape) if field.name in config}
    return Shape(**sizes, train_window_tokens=yarn["original_max_position_embeddings"], yarn_factor=yarn["factor"])
