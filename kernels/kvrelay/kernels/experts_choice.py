"""Choosing experts: their scores in fp32, and the best of them.

Shapes in this file: T tokens, D hidden, E experts, K experts per token.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

# Up to this many tokens the product reads little but the weight, which one pass without a conversion does best.
FEW_TOKENS = 64


def expert_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x @ weight^T [T, E] in fp32; `weight_ED` is fp32."""
    if x_TD.is_cuda and x_TD.shape[0] <= FEW_TOKENS:
        from kvrelay.kernels.triton_layer import router_logits  # noqa: PLC0415 - CPUs need no Triton

        return router_logits(x_TD, weight_ED)
    return F.linear(x_TD.float(), weight_ED)


def softmax_experts(logits_TE: Tensor, *, num_chosen: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return (weights_TK fp32, experts_TK int64) of the `num_chosen` most likely experts.

    Args:
        scale: factor on the weights.
        normalise: weights sum to 1 before they are scaled.
    """
    if logits_TE.is_cuda:
        from kvrelay.kernels.triton_layer import softmax_top  # noqa: PLC0415

        return softmax_top(logits_TE, top=num_chosen, scale=scale, normalise=normalise)
    weights_TK, experts_TK = logits_TE.softmax(-1).topk(num_chosen, sorted=False)
    if normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * scale, experts_TK
