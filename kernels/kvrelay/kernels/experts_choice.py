"""Choosing experts: their scores in fp32, and the best of them.

Shapes in this file: T tokens, D hidden, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this many tokens the product reads little but the weight, which one pass without a conversion does best.
FEW_TOKENS = 64


def bf16_parts(weight_ED: Tensor) -> Tensor | None:
    """Return bf16 [P, E, D], P at most 3, whose sum in fp32 is exactly `weight_ED`, or None where there is none.

    Three times the 8 bits of bf16 are the 24 of fp32; a weight that was bf16 in its checkpoint is its only part.
    None is for numbers that are not finite, or so small that their last bits lie below what bf16 holds.
    """
    parts, rest_ED = [], weight_ED
    for _ in range(3):
        part_ED = rest_ED.bfloat16()
        parts.append(part_ED)
        rest_ED = rest_ED - part_ED.float()
        if not rest_ED.any():
            return torch.stack(parts)
    return None


def expert_logits(x_TD: Tensor, weight_ED: Tensor, parts_PED: Tensor | None = None) -> Tensor:
    """Return x @ weight^T [T, E], as exact as an fp32 product.

    Args:
        weight_ED: fp32.
        parts_PED: `bf16_parts` of it: tokens in bf16 are then multiplied on matrix units, and none is widened.
    """
    if x_TD.is_cuda and x_TD.shape[0] <= FEW_TOKENS:
        from kvrelay.kernels.triton_layer import router_logits  # noqa: PLC0415 - CPUs need no Triton

        return router_logits(x_TD, weight_ED)
    if parts_PED is not None and x_TD.is_cuda and x_TD.dtype == torch.bfloat16:
        from kvrelay.kernels.triton_router import logits_of_parts  # noqa: PLC0415

        return logits_of_parts(x_TD, parts_PED)
    return F.linear(x_TD.float(), weight_ED)


def softmax_experts(
    logits_TE: Tensor, *, num_chosen: int, scale: float, normalise: bool, num_always: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (weights_TK fp32, experts_TK int64) of the `num_chosen` most likely experts.

    Args:
        scale: factor on the weights.
        normalise: weights sum to 1 before they are scaled.
        num_always: experts numbered from E on that every token goes to, with weight 1; they come last.
    """
    if logits_TE.is_cuda:
        from kvrelay.kernels.triton_layer import softmax_top  # noqa: PLC0415

        return softmax_top(logits_TE, top=num_chosen, scale=scale, normalise=normalise, always=num_always)
    weights_TK, experts_TK = logits_TE.softmax(-1).topk(num_chosen, sorted=False)
    if normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return with_always(weights_TK * scale, experts_TK, first=logits_TE.shape[1], num_always=num_always)


def with_always(weights_TK: Tensor, experts_TK: Tensor, *, first: int, num_always: int) -> tuple[Tensor, Tensor]:
    """Return both with the experts from `first` on behind, each with weight 1."""
    if not num_always:
        return weights_TK, experts_TK
    more_TK = torch.arange(first, first + num_always, device=experts_TK.device).expand(len(experts_TK), -1)
    return torch.cat((weights_TK, torch.ones_like(more_TK, dtype=torch.float32)), 1), torch.cat(
        (experts_TK, more_TK), 1
    )
