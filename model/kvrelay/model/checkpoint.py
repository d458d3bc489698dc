"""From a Hugging Face folder to a model in memory.

Rope rows that a checkpoint stores as interleaved pairs are permuted here, once, so that everything else in the program
is half-split. Products that share an input are joined into one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import psutil
import torch
import xxhash
from torch import Tensor

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.layout import DTYPE_BYTES
from kvrelay.kernels.experts_choice import bf16_parts
from kvrelay.kernels.rope import Rope, half_split_order
from kvrelay.model.checkpoint_files import CheckpointFiles, files_of
from kvrelay.model.config import ModelConfig, load_config
from kvrelay.model.config_reader import read_json_object
from kvrelay.model.mla import Attention, AttentionWeights, expansion
from kvrelay.model.moe import FeedForward, GatedMlp, Moe, Router
from kvrelay.model.tensors import loaded_bytes
from kvrelay.model.transformer import Layer, Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Files up to this size enter the model's digest whole, larger ones by evenly spaced samples.
DIGEST_WHOLE_BYTES = 16 << 20
DIGEST_SAMPLES = 256
DIGEST_SAMPLE_BYTES = 4096


def load_model(folder: Path, *, dtype: str, device: torch.device, max_model_len: int | None = None) -> Model:
    """Load a checkpoint.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on CPUs, the checkpoint's own elsewhere.
        max_model_len: longest prompt plus output to serve; None = what config.json says.

    Raises:
        ModelLoadError: the checkpoint is incomplete, damaged or asks for something that is not implemented (names the
            file and the key or tensor), or does not fit (names the bytes needed and free).
    """
    config = load_config(folder, max_model_len)
    dtype = resolve_dtype(dtype, config, device)
    with CheckpointFiles(folder, config) as files:
        _check_memory(folder, loaded_bytes(config, DTYPE_BYTES[dtype], device_type=device.type), device)
        return build_model(files, config, dtype=DTYPES[dtype], device=device, model_id=model_id(folder))


class TensorSource(Protocol):
    """Where a model's tensors come from, by their name in a checkpoint."""

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one of `tensors.expected_tensors`, on any device; the caller may keep and change it."""
        ...


def build_model(
    source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, model_id: str
) -> Model:
    """Return a model of a source's tensors."""
    return _Builder(source, config, dtype, device).model(model_id)


def resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> str:
    """Return the name of the dtype that weights and pool have on `device`."""
    if dtype == "auto":
        return "float32" if device.type == "cpu" else config.checkpoint_dtype
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return dtype


def model_id(folder: Path) -> str:
    """Return a digest of what the model computes: its config, and its weight files by name, size and samples.

    Equal for copies of a checkpoint, whatever their folder and dates. Reads small files whole and at most 1 MiB of a
    large one, header included.
    """
    digest = xxhash.xxh3_128()
    config = read_json_object(folder / "config.json")
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in files_of(folder):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= DIGEST_WHOLE_BYTES:
                digest.update(file.read())
                continue
            for sample in range(DIGEST_SAMPLES):
                file.seek((size - DIGEST_SAMPLE_BYTES) * sample // (DIGEST_SAMPLES - 1))
                digest.update(file.read(DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()


def _check_memory(folder: Path, needed_bytes: int, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    free_bytes = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise ModelLoadError(
            f"{folder}: the weights need {needed_bytes} bytes on {device}, {free_bytes} bytes are free"
        )


class _Builder:
    """Takes tensors by name and puts them where the computation wants them."""

    def __init__(self, files: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._config = config
        self._dtype = dtype
        self._device = device

    def model(self, model_id: str) -> Model:
        config = self._config
        embedding_VD = self._take("model.embed_tokens.weight")
        return Model(
            config=config,
            model_id=model_id,
            dtype=self._dtype,
            device=self._device,
            layers=tuple(self._layer(layer) for layer in range(config.num_layers)),
            embedding_VD=embedding_VD,
            final_norm_D=self._take("model.norm.weight"),
            head_VD=embedding_VD if config.tie_word_embeddings else self._take("lm_head.weight"),
            rotary=Rope(config.rope, self._device),
        )

    def _take(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._files.take(name, dtype or self._dtype).to(self._device)

    def _layer(self, layer: int) -> Layer:
        prefix = f"model.layers.{layer}"
        feed_forward: FeedForward = (
            self._moe(f"{prefix}.mlp") if self._config.is_moe_layer(layer) else self._mlp(f"{prefix}.mlp")
        )
        return Layer(
            self._attention(f"{prefix}.self_attn"),
            feed_forward,
            input_norm_D=self._take(f"{prefix}.input_layernorm.weight"),
            post_norm_D=self._take(f"{prefix}.post_attention_layernorm.weight"),
            eps=self._config.rms_norm_eps,
        )

    def _attention(self, prefix: str) -> Attention:
        config = self._config
        low_rank = config.q_lora_rank is not None
        query = "q_a_proj" if low_rank else "q_proj"
        query_rows = self._take(f"{prefix}.{query}.weight")
        row_rows = self._half_split(self._take(f"{prefix}.kv_a_proj_with_mqa.weight"), config.kv_lora_rank)
        kv_up = self._take(f"{prefix}.kv_b_proj.weight")
        by_head = kv_up.view(config.num_heads, config.nope_width + config.value_width, config.kv_lora_rank)
        weights = AttentionWeights(
            in_proj=torch.cat((query_rows if low_rank else self._half_split_heads(query_rows), row_rows)),
            in_bias=self._in_bias(prefix, query_rows.shape[0]) if config.attention_bias else None,
            q_norm=self._take(f"{prefix}.q_a_layernorm.weight") if low_rank else None,
            q_up=self._half_split_heads(self._take(f"{prefix}.q_b_proj.weight")) if low_rank else None,
            kv_norm_C=self._take(f"{prefix}.kv_a_layernorm.weight"),
            kv_up=kv_up,
            key_up_NPC=by_head[:, : config.nope_width],
            value_up_NCV=by_head[:, config.nope_width :].transpose(1, 2),
            expand=expansion(by_head, config) if self._device.type == "cuda" else None,
            out_proj=self._take(f"{prefix}.o_proj.weight"),
            out_bias=self._take(f"{prefix}.o_proj.bias") if config.attention_bias else None,
        )
        return Attention(config, weights)

    def _in_bias(self, prefix: str, query_rows: int) -> Tensor:
        rows = self._half_split(self._take(f"{prefix}.kv_a_proj_with_mqa.bias"), self._config.kv_lora_rank)
        if self._config.q_lora_rank is None:  # q_proj never has a bias
            return torch.cat((rows.new_zeros(query_rows), rows))
        return torch.cat((self._take(f"{prefix}.q_a_proj.bias"), rows))

    def _half_split(self, rows: Tensor, first: int) -> Tensor:
        """Permute the rope rows, which start at row `first` and are the last ones, from interleaved to half-split."""
        if not self._config.rope_interleaved:
            return rows
        order = half_split_order(self._config.rope_width).to(rows.device)
        return torch.cat((rows[:first], rows[first:][order]))

    def _half_split_heads(self, rows: Tensor) -> Tensor:
        """Permute the rope rows of every head of a query projection."""
        if not self._config.rope_interleaved:
            return rows
        order = half_split_order(self._config.rope_width).to(rows.device) + self._config.nope_width
        order = torch.cat((torch.arange(self._config.nope_width, device=rows.device), order))
        return rows.view(self._config.num_heads, self._config.key_width, -1)[:, order].flatten(0, 1)

    def _mlp(self, prefix: str) -> GatedMlp:
        gate, up = self._take(f"{prefix}.gate_proj.weight"), self._take(f"{prefix}.up_proj.weight")
        return GatedMlp(gate_up=torch.cat((gate, up)), down=self._take(f"{prefix}.down_proj.weight"))

    def _moe(self, prefix: str) -> Moe:
        moe = self._config.moe
        assert moe is not None, "an MoE layer has an MoE config"
        hidden, width = self._config.hidden_size, moe.expert_width
        # On a GPU shared experts are more of the same, so that one launch takes them all.
        folded = moe.shared_width // width if self._device.type == "cuda" else 0
        num_experts = moe.num_experts + folded
        gate_up = torch.empty(num_experts, 2 * width, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(num_experts, hidden, width, dtype=self._dtype, device=self._device)
        for expert in range(moe.num_experts):
            gate_up[expert, :width] = self._take(f"{prefix}.experts.{expert}.gate_proj.weight")
            gate_up[expert, width:] = self._take(f"{prefix}.experts.{expert}.up_proj.weight")
            down[expert] = self._take(f"{prefix}.experts.{expert}.down_proj.weight")
        down_always = None
        if folded:
            shared = f"{prefix}.shared_experts"
            down_always = self._take(f"{shared}.down_proj.weight")
            gate_up[moe.num_experts :, :width] = self._take(f"{shared}.gate_proj.weight").view(folded, width, hidden)
            gate_up[moe.num_experts :, width:] = self._take(f"{shared}.up_proj.weight").view(folded, width, hidden)
            down[moe.num_experts :] = down_always.view(hidden, folded, width).transpose(0, 1)
        biased = moe.routing.value == "noaux_tc"
        weight_ED = self._take(f"{prefix}.gate.weight", torch.float32)
        on_matrix_units = self._device.type == "cuda" and self._dtype == torch.bfloat16
        router = Router(
            config=moe,
            weight_ED=weight_ED,
            bias_E=self._take(f"{prefix}.gate.e_score_correction_bias", torch.float32) if biased else None,
            num_always=folded,
            parts_PED=bf16_parts(weight_ED) if on_matrix_units else None,
        )
        separate = moe.shared_width and not folded
        apart = self._mlp(f"{prefix}.shared_experts") if separate else None
        return Moe(router, gate_up, down, apart, down_always)
