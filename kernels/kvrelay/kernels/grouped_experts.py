"""Routed experts on a GPU without the host knowing who goes where: nothing waits, and a graph can record it.

Shapes in this file: T tokens, D hidden, E experts, I expert width, K experts per token, A = T * K pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Up to this many (token, expert) pairs the time is that of reading the weights. 64 tokens of 8 experts each.
FEW_PAIRS = 512


def grouped_experts_refuse(x_TD: Tensor) -> str | None:
    """Return None, or the reason the grouped products cannot run on such an input."""
    if not x_TD.is_cuda:
        return f"runs on cuda, not {x_TD.device.type}"
    if x_TD.dtype != torch.bfloat16:
        return f"takes bf16, not {x_TD.dtype}"
    if x_TD.shape[1] % 8:
        return f"takes widths that are multiples of 8, not {x_TD.shape[1]}"
    capability = torch.cuda.get_device_capability(x_TD.device)
    return None if capability[0] >= 9 else f"needs compute capability 9, this is {capability}"


def grouped_experts(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_E2ID: Tensor, down_EDI: Tensor
) -> Tensor:
    """Return per token the weighted sum of its experts' gated MLPs.

    Args:
        x_TD: bf16.
        weights_TK: fp32.
        experts_TK: int64.
    """
    from kvrelay.kernels.triton_layer import combine, gated  # noqa: PLC0415 - CPUs need no Triton

    if experts_TK.numel() <= FEW_PAIRS:
        from kvrelay.kernels.triton_experts import few_tokens_experts  # noqa: PLC0415

        return few_tokens_experts(x_TD, weights_TK, experts_TK, gate_up_E2ID, down_EDI)
    num_experts, per_token = gate_up_E2ID.shape[0], experts_TK.shape[1]
    experts_A, order_A = torch.sort(experts_TK.flatten(), stable=True)
    experts_E = torch.arange(num_experts, device=x_TD.device)
    ends_E = torch.searchsorted(experts_A, experts_E, right=True, out_int32=True)
    x_AD = x_TD.index_select(0, order_A // per_token)
    wide_A2I = torch._grouped_mm(x_AD, gate_up_E2ID.transpose(1, 2), offs=ends_E)  # noqa: SLF001 - no public name
    out_AD = torch._grouped_mm(gated(wide_A2I), down_EDI.transpose(1, 2), offs=ends_E)  # noqa: SLF001
    pairs_A = torch.arange(len(order_A), device=x_TD.device)
    places_A = torch.empty_like(order_A).scatter_(0, order_A, pairs_A)
    return combine(out_AD, places_A.view_as(experts_TK), weights_TK)
