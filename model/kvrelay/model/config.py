"""What a checkpoint's config.json says, in our words.

Two spellings are read: DeepSeek's own (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of transformers 5
(`rope_parameters`, `dtype`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kvrelay.core.errors import ModelLoadError
from kvrelay.kernels.rope_spec import RopeKind, RopeSpec
from kvrelay.model import config_keys
from kvrelay.model.config_reader import KeyReader, read_json_object

FP8_BLOCK = (128, 128)  # rows and columns that share one scale


class Routing(Enum):
    """How a token's experts are chosen."""

    SOFTMAX_GREEDY = "greedy"  # V2-Lite
    SOFTMAX_GROUP_LIMITED = "group_limited_greedy"  # V2
    SIGMOID_NOAUX = "noaux_tc"  # V3


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    routing: Routing
    num_experts: int
    experts_per_token: int
    num_groups: int
    groups_per_token: int
    expert_width: int
    shared_width: int  # 0 = no shared experts
    weight_scale: float  # routed_scaling_factor
    normalise_weights: bool
    first_moe_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model; widths are numbers per head or token, filled by `load_config`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense feed-forward layers
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int  # C
    nope_width: int
    rope_width: int  # R
    value_width: int  # V
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    moe: MoeConfig | None
    rope: RopeSpec
    rope_interleaved: bool  # how the checkpoint stores rope rows; in memory they are half-split
    max_position_embeddings: int
    max_model_len: int  # longest prompt plus output that is served
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    checkpoint_dtype: str  # "float32" | "bfloat16" | "float16", of most weights
    fp8_blocks: bool  # linear weights may be float8 with a scale per block

    @property
    def key_width(self) -> int:
        """K, numbers per head of a query or an expanded key."""
        return self.nope_width + self.rope_width

    @property
    def softmax_scale(self) -> float:
        return float(self.key_width**-0.5 * self.rope.softmax_scale)

    @property
    def cache_window_tokens(self) -> int | None:
        """Requests longer than this (prompt + max_tokens) neither publish nor use cached blocks; None = no limit.

        Beyond its window dynamic NTK rotates keys by the length of their own request.
        """
        return self.max_position_embeddings if self.rope.kind is RopeKind.DYNAMIC else None

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_moe_layer


def load_config(folder: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read and judge config.json (and generation_config.json, for the end tokens) of a Hugging Face folder.

    Args:
        max_model_len: longest prompt plus output to serve; None = max_position_embeddings.

    Raises:
        ModelLoadError: a file or key is missing or wrong, or asks for something that is not implemented; names it.
    """
    path = folder / "config.json"
    keys = KeyReader(read_json_object(path), str(path))
    family = keys.raw("model_type")
    if family not in config_keys.FIXED_BY_FAMILY:
        raise keys.refusal("model_type", family, f"it must be one of {', '.join(config_keys.FIXED_BY_FAMILY)}")
    for key, only, why in (*config_keys.FIXED, *config_keys.FIXED_BY_FAMILY[family]):
        value = keys.raw(key, only)
        if value not in (only, None):
            raise keys.refusal(key, value, f"{why}; only {only!r} is")
    config = _read(keys, family, folder, max_model_len)
    _judge_unread(keys)
    return config


def _read(keys: KeyReader, family: str, folder: Path, max_model_len: int | None) -> ModelConfig:
    nope_width, rope_width = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim", least=2)
    num_heads = keys.count("num_attention_heads")
    for key, only in (
        ("num_key_value_heads", num_heads),
        ("head_dim", rope_width),
        ("qk_head_dim", nope_width + rope_width),
    ):
        if (value := keys.raw(key, only)) not in (only, None):
            raise keys.refusal(key, value, f"with these other widths it must be {only}")
    if rope_width % 2:
        raise keys.error("qk_rope_head_dim", rope_width, "even")
    max_positions = keys.count("max_position_embeddings")
    rope = _rope(keys, rope_width, max_positions)
    num_layers = keys.count("num_hidden_layers")
    return ModelConfig(
        model_type=family,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        q_lora_rank=None if keys.raw("q_lora_rank") is None else keys.count("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        nope_width=nope_width,
        rope_width=rope_width,
        value_width=keys.count("v_head_dim"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        attention_bias=keys.flag("attention_bias", default=False),
        tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
        moe=_moe(keys, family, num_layers),
        rope=rope,
        rope_interleaved=keys.flag("rope_interleave", default=True),
        max_position_embeddings=max_positions,
        max_model_len=_max_model_len(rope, max_positions, max_model_len),
        eos_token_ids=_eos_token_ids(keys, folder),
        bos_token_id=keys.raw("bos_token_id"),
        checkpoint_dtype=_dtype(keys),
        fp8_blocks=_fp8_blocks(keys),
    )


def _moe(keys: KeyReader, family: str, num_layers: int) -> MoeConfig | None:
    names = (
        "n_routed_experts num_experts_per_tok n_group topk_group moe_intermediate_size n_shared_experts "
        "routed_scaling_factor norm_topk_prob first_k_dense_replace topk_method"
    )
    if keys.raw("n_routed_experts") is None:
        for name in names.split():  # they say nothing without experts
            keys.raw(name)
        return None
    method = (
        keys.raw("topk_method") or (Routing.SIGMOID_NOAUX if family == "deepseek_v3" else Routing.SOFTMAX_GREEDY).value
    )
    if method not in {routing.value for routing in Routing} or (family == "deepseek_v2" and method == "noaux_tc"):
        raise keys.refusal("topk_method", method, "no such router in this family")
    first_moe_layer = keys.count("first_k_dense_replace", least=0)
    expert_width = keys.count("moe_intermediate_size")
    groups_default = 1 if method == Routing.SOFTMAX_GREEDY.value else None  # the greedy router has no groups
    moe = MoeConfig(
        routing=Routing(method),
        num_experts=keys.count("n_routed_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        num_groups=keys.count("n_group", groups_default),
        groups_per_token=keys.count("topk_group", groups_default),
        expert_width=expert_width,
        shared_width=expert_width * keys.count("n_shared_experts", 0, least=0),
        weight_scale=keys.number("routed_scaling_factor"),
        normalise_weights=family == "deepseek_v3" and keys.flag("norm_topk_prob", default=True),
        first_moe_layer=first_moe_layer,
    )
    if moe.num_experts % moe.num_groups:
        raise keys.error("n_group", moe.num_groups, f"a divisor of n_routed_experts = {moe.num_experts}")
    if moe.groups_per_token > moe.num_groups:
        raise keys.error("topk_group", moe.groups_per_token, f"at most n_group = {moe.num_groups}")
    eligible = moe.num_experts
    if moe.routing is not Routing.SOFTMAX_GREEDY:
        eligible = moe.num_experts // moe.num_groups * moe.groups_per_token
    if moe.experts_per_token > eligible:
        raise keys.error(
            "num_experts_per_tok", moe.experts_per_token, f"at most {eligible}, the experts to choose from"
        )
    return moe if first_moe_layer < num_layers else None


def _rope(keys: KeyReader, width: int, max_positions: int) -> RopeSpec:
    older, newer = keys.raw("rope_scaling"), keys.raw("rope_parameters")
    name, settings = ("rope_parameters", newer) if newer else ("rope_scaling", older or {})
    if not isinstance(settings, dict):
        raise keys.error(name, settings, "an object or null")
    theta = keys.number("rope_theta", 10000.0)
    inner = KeyReader(settings, name)
    theta = inner.number("rope_theta", theta)
    old, new = inner.raw("type"), inner.raw("rope_type")
    kind = new or old or "default"
    if kind not in config_keys.ROPE_KEYS:
        raise keys.refusal(f"{name}.{'rope_type' if new else 'type'}", kind, "an unknown way to scale rope")
    if old and new and old != new:
        raise keys.refusal(f"{name}.type", old, f"rope_type says {new!r}")
    allowed = config_keys.ROPE_KEYS[kind]
    for key, value in inner.unread():
        if key not in allowed and not _is_off(value):
            raise keys.refusal(f"{name}.{key}", value, f"not known for rope of type {kind!r}")
    original = inner.count("original_max_position_embeddings", max_positions)
    if kind == "dynamic" and original != max_positions:
        raise keys.refusal(
            f"{name}.original_max_position_embeddings", original, "dynamic rope starts from max_position_embeddings"
        )
    return RopeSpec(
        kind=RopeKind(kind),
        width=width,
        theta=theta,
        factor=1.0 if kind == "default" else inner.number("factor"),
        original_max_tokens=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        mscale=inner.number("mscale", 0.0, positive=False),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0, positive=False),
        attention_factor=None if inner.raw("attention_factor") is None else inner.number("attention_factor"),
    )


def _max_model_len(rope: RopeSpec, max_positions: int, wanted: int | None) -> int:
    if wanted is None:
        return max_positions
    if wanted < 1:
        raise ModelLoadError(f"max_model_len {wanted} is not at least 1")
    limit = max(max_positions, int(rope.factor * rope.original_max_tokens))
    if rope.kind is not RopeKind.DYNAMIC and wanted > limit:
        raise ModelLoadError(
            f"max_model_len {wanted} is longer than the {limit} tokens that the checkpoint's rope covers"
        )
    return wanted


def _eos_token_ids(keys: KeyReader, folder: Path) -> tuple[int, ...]:
    """Return the end tokens; generation_config.json is the later word."""
    value = keys.raw("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists():
        found = read_json_object(generation).get("eos_token_id")
        value = value if found is None else found
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise keys.error("eos_token_id", value, "a token id or a list of them")
    return tuple(ids)


def _dtype(keys: KeyReader) -> str:
    old, new = keys.raw("torch_dtype"), keys.raw("dtype")
    dtype = str(new or old or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise keys.refusal("dtype", dtype, "it must be float32, bfloat16 or float16")
    return dtype


def _fp8_blocks(keys: KeyReader) -> bool:
    settings: Any = keys.raw("quantization_config")
    if not settings:
        return False
    if not isinstance(settings, dict) or settings.get("quant_method") != "fp8":
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise keys.refusal("quantization_config.quant_method", method, "only fp8 weights with a scale per block are")
    block = settings.get("weight_block_size")
    if block != list(FP8_BLOCK):
        raise keys.refusal("quantization_config.weight_block_size", block, f"it must be {list(FP8_BLOCK)}")
    if settings.get("fmt", "e4m3") != "e4m3":
        raise keys.refusal("quantization_config.fmt", settings["fmt"], "it must be e4m3")
    return True


def _is_off(value: object) -> bool:
    return value is None or value is False or value in (0, "", [], {})


def _judge_unread(keys: KeyReader) -> None:
    for key, value in keys.unread():
        if key in config_keys.IGNORED or key.startswith("_") or _is_off(value):
            continue
        raise keys.refusal(key, value, config_keys.REFUSED.get(key, "a key that is not known may change the result"))
