"""Models of known shapes with random weights, made on the device: speed and memory depend on the shape alone.

But for one thing: how many experts a batch hits depends on the router, so that can be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvrelay.kernels.rope_spec import RopeKind, RopeSpec
from kvrelay.model.checkpoint import build_model
from kvrelay.model.config import ModelConfig, MoeConfig, Routing
from kvrelay.model.tensors import expected_tensors, is_router
from kvrelay.model.transformer import Model

_LITE_MOE = MoeConfig(
    routing=Routing.SOFTMAX_GREEDY,
    num_experts=64,
    experts_per_token=6,
    num_groups=1,
    groups_per_token=1,
    expert_width=1408,
    shared_width=2 * 1408,
    weight_scale=1.0,
    normalise_weights=False,
    first_moe_layer=1,
)
# deepseek-ai/DeepSeek-V2-Lite, config.json; the longest length is ours, since nothing here reads the text.
V2_LITE = ModelConfig(
    model_type="deepseek_v2",
    vocab_size=102_400,
    hidden_size=2048,
    intermediate_size=10_944,
    num_layers=27,
    num_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    nope_width=128,
    rope_width=64,
    value_width=128,
    rms_norm_eps=1e-6,
    attention_bias=False,
    tie_word_embeddings=False,
    moe=_LITE_MOE,
    rope=RopeSpec(
        kind=RopeKind.YARN, width=64, theta=10_000.0, factor=40.0, original_max_tokens=4096, mscale=0.707,
        mscale_all_dim=0.707,
    ),
    rope_interleaved=True,
    max_position_embeddings=163_840,
    max_model_len=1 << 21,
    eos_token_ids=(100_001,),
    bos_token_id=100_000,
    checkpoint_dtype="bfloat16",
    fp8_blocks=False,
)  # fmt: skip
# The same structure, small enough for tests on CPUs.
TINY = replace(
    V2_LITE,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    kv_lora_rank=32,
    nope_width=16,
    rope_width=8,
    value_width=16,
    moe=replace(_LITE_MOE, num_experts=8, experts_per_token=2, expert_width=32, shared_width=64),
    rope=replace(V2_LITE.rope, width=8),
)
SHAPES = {"v2-lite": V2_LITE, "tiny": TINY}
DUMMY_LIMIT = 1e-3


@dataclass(frozen=True, slots=True)
class RandomTensors:
    """Weights whose products keep the size of their input, norms are 1; or dummies.

    Which ones makes a difference, since a GPU's matrix units take less power the less their numbers differ.
    """

    shapes: dict[str, tuple[int, ...]]
    device: torch.device
    generator: torch.Generator
    same_experts: bool
    dummy: bool

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self.shapes[name]
        if self.same_experts and is_router(name):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        if self.dummy:
            made = torch.empty(shape, dtype=dtype, device=self.device)
            return made.uniform_(-DUMMY_LIMIT, DUMMY_LIMIT, generator=self.generator)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self.device)
        made = torch.randn(shape, dtype=dtype, device=self.device, generator=self.generator)
        return made.mul_(1.0 if "embed_tokens" in name else shape[-1] ** -0.5)


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0, same_experts: bool = False,
    dummy: bool = False,
) -> Model:  # fmt: skip
    """Return a model of a shape with random weights.

    Args:
        same_experts: routers of zeros send every token to the same experts; else tokens spread over all of them.
        dummy: all numbers, norms too, lie evenly between -0.001 and 0.001, which is what vLLM calls dummy weights.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = RandomTensors(expected_tensors(config), device, generator, same_experts, dummy)
    return build_model(tensors, config, dtype=dtype, device=device, model_id=f"random-{seed}")
