"""A compact DeepSeek-V3 decoder for training: MLA, shared and routed experts, tied embedding.

Same arithmetic and the same parameter names (up to the stacked experts) as the published model; export.py
writes the usual file. All routed experts are computed for every token and weighted afterwards: at this size
one dense product is faster than gathering, and nothing is dropped.

Shapes in this file: B rows, T tokens, D hidden, N heads, K query/key width, V value width, E experts, I expert width.
"""

import torch
import torch.nn.functional as F
from rope import inverse_frequencies, rotate_pairs, softmax_scale
from shape import Shape
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


def linear(width_in: int, width_out: int) -> nn.Linear:
    return nn.Linear(width_in, width_out, bias=False)


class Attention(nn.Module):
    """Multi-head latent attention, keys and values expanded."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_attention_heads
        self.q_a_proj = linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank)
        self.q_b_proj = linear(shape.q_lora_rank, heads * shape.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank)
        self.kv_b_proj = linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        self.o_proj = linear(heads * shape.v_head_dim, shape.hidden_size)

    def forward(self, x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor, scale: float) -> Tensor:
        shape, heads = self.shape, self.shape.num_attention_heads
        rows, tokens, _ = x_BTD.shape
        q_BNTK = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))).view(rows, tokens, heads, -1).transpose(1, 2)
        q_nope, q_rope = q_BNTK.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BTD).split((shape.kv_lora_rank, shape.qk_rope_head_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, tokens, heads, -1).transpose(1, 2)
        k_nope, v_BNTV = expanded.split((shape.qk_nope_head_dim, shape.v_head_dim), dim=-1)
        q_rope = rotate_pairs(q_rope, cos_TR, sin_TR).to(q_nope.dtype)
        k_rope = rotate_pairs(k_rope, cos_TR, sin_TR).to(k_nope.dtype)[:, None].expand(-1, heads, -1, -1)
        # The flash kernel wants one width for keys and values: zero columns change nothing and are cut off again.
        v_padded = F.pad(v_BNTV, (0, shape.qk_head_dim - shape.v_head_dim))
        out = F.scaled_dot_product_attention(
            torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v_padded, is_causal=True, scale=scale
        )
        return self.o_proj(out[..., : shape.v_head_dim].transpose(1, 2).reshape(rows, tokens, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """noaux_tc: sigmoid scores; the bias only steers the choice (arXiv:2408.15664)."""

    e_score_correction_bias: Tensor
    load_E: Tensor
    last_load_E: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k, self.factor = shape.num_experts_per_tok, shape.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.register_buffer("load_E", torch.zeros(shape.n_routed_experts), persistent=False)
        self.register_buffer("last_load_E", torch.zeros(shape.n_routed_experts), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return fp32 weights [B, T, E], zero for the experts not chosen."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores = F.linear(x_BTD.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load_E.add_(mask.detach().sum((0, 1)))
        kept = scores * mask
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.factor


class MoE(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, width, hidden = shape.n_routed_experts, shape.moe_intermediate_size, shape.hidden_size
        self.gate = Router(shape)
        self.experts_gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.experts_up = nn.Parameter(torch.empty(experts, width, hidden))
        self.experts_down = nn.Parameter(torch.empty(experts, hidden, width))
        self.shared_experts = MLP(hidden, width * shape.n_shared_experts)

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights_BTE = self.gate(x_BTD)
        hidden = x_BTD.shape[-1]
        gate = F.linear(x_BTD, self.experts_gate.view(-1, hidden))
        up = F.linear(x_BTD, self.experts_up.view(-1, hidden))
        inner = (F.silu(gate) * up).unflatten(-1, (weights_BTE.shape[-1], -1)) * weights_BTE[..., None].to(gate.dtype)
        down = self.experts_down.transpose(0, 1).reshape(hidden, -1)  # [D, E*I]
        return F.linear(inner.flatten(-2), down) + self.shared_experts(x_BTD)


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        dense = index < shape.first_k_dense_replace
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size) if dense else MoE(shape)

    def forward(self, x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor, scale: float) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TR, sin_TR, scale)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # Residual writers start small, so that depth does not grow the stream.
                shrink = (2 * shape.num_hidden_layers) ** -0.5 if "down" in name or "o_proj" in name else 1.0
                nn.init.normal_(
                    parameter, std=0.02 * shrink if "embed" in name else shrink * parameter.shape[-1] ** -0.5 * 0.6
                )

    def hidden(self, ids_BT: Tensor, *, yarn: bool) -> Tensor:
        """Return the final normalised hidden states [B, T, D]; token 0 of each row is at position 0."""
        angles = torch.arange(ids_BT.shape[1], device=ids_BT.device).float()[:, None]
        angles = angles * inverse_frequencies(self.shape, yarn=yarn).to(ids_BT.device)
        cos_TR, sin_TR = angles.cos(), angles.sin()
        scale = softmax_scale(self.shape, yarn=yarn)
        x_BTD = self.embed_tokens(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TR, sin_TR, scale)
        return self.norm(x_BTD)

    def forward(self, ids_BT: Tensor, *, yarn: bool) -> Tensor:
        """Return logits [B, T, vocab]."""
        return F.linear(self.hidden(ids_BT, yarn=yarn), self.embed_tokens.weight)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move each router's bias against its load since the last call."""
        for router in self.routers():
            router.e_score_correction_bias.add_(rate * torch.sign(router.load_E.mean() - router.load_E))
            router.last_load_E.copy_(router.load_E)
            router.load_E.zero_()

    def routers(self) -> list[Router]:
        return [layer.mlp.gate for layer in self.layers if isinstance(layer.mlp, MoE)]

    def worst_load(self) -> float:
        """Return the largest share of tokens an expert had in the last step, over the mean share."""
        return max(float(r.last_load_E.max() / r.last_load_E.mean().clamp(min=1e-9)) for r in self.routers())
