"""Routed experts on a GPU without the host knowing who goes where: nothing waits, and a graph can record it.

Shapes in this file: T tokens, D hidden, E experts, S experts that every token goes to, I expert width,
K experts chosen per token, A = T * K pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrelay.kernels import quack_experts

if TYPE_CHECKING:
    from kvrelay.kernels.triton_order import ExpertOrder

# From here on kernels pay that take longer to launch: with 2,048 tokens launching is what takes the time.
QUACK_TOKENS = 4096
# Up to this many tokens the time is that of reading the weights.
FEW_TOKENS = 64


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
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up_E2ID: Tensor,
    down_EDI: Tensor,
    *,
    num_apart: int = 0,
    into_TD: Tensor | None = None,
) -> Tensor:
    """Return per token the weighted sum of its experts' gated MLPs.

    Args:
        x_TD: bf16.
        weights_TK: fp32.
        experts_TK: int64.
        num_apart: the last experts of the stacks, which are not chosen: every token goes to them with weight 1. Then
            no token is copied for them.
        into_TD: contiguous, receives the sum on top of what it holds, and is returned.
    """
    from kvrelay.kernels.triton_layer import combine  # noqa: PLC0415 - CPUs need no Triton
    from kvrelay.kernels.triton_order import expert_order  # noqa: PLC0415

    if len(x_TD) <= FEW_TOKENS and not num_apart:
        from kvrelay.kernels.triton_experts import few_tokens_experts  # noqa: PLC0415

        return few_tokens_experts(x_TD, weights_TK, experts_TK, gate_up_E2ID, down_EDI, into_TD=into_TD)
    num_chosen = len(gate_up_E2ID) - num_apart
    order = expert_order(experts_TK, num_chosen)
    chosen, apart = (_quack_chosen, _quack_apart) if _takes_quack(x_TD, down_EDI) else (_torch_chosen, _torch_apart)
    out_AD = chosen(x_TD, order, gate_up_E2ID[:num_chosen], down_EDI[:num_chosen])
    more_STD = apart(x_TD, gate_up_E2ID[num_chosen:], down_EDI[num_chosen:]) if num_apart else None
    return combine(out_AD, order.places_TK, weights_TK, more_STD=more_STD, into_TD=into_TD)


def _takes_quack(x_TD: Tensor, down_EDI: Tensor) -> bool:
    aligned = down_EDI.shape[2] % 8 == 0
    return aligned and len(x_TD) >= QUACK_TOKENS and quack_experts.quack_refuses(x_TD.device) is None


def _quack_chosen(x_TD: Tensor, order: ExpertOrder, gate_up_E2ID: Tensor, down_EDI: Tensor) -> Tensor:
    return quack_experts.chosen_down(quack_experts.chosen_gate_up(x_TD, order, gate_up_E2ID), order, down_EDI)


def _torch_chosen(x_TD: Tensor, order: ExpertOrder, gate_up_E2ID: Tensor, down_EDI: Tensor) -> Tensor:
    """Return what experts make of their tokens, in the order of pairs. What is not needed any more is not named: these
    are the largest temporaries of a prefill."""
    from kvrelay.kernels.triton_layer import gated  # noqa: PLC0415
    from kvrelay.kernels.triton_order import spread  # noqa: PLC0415

    ends_E = order.bounds_E1[1:]
    narrow_AI = gated(torch._grouped_mm(spread(x_TD, order), gate_up_E2ID.mT, offs=ends_E))  # noqa: SLF001 - no public name
    return torch._grouped_mm(narrow_AI, down_EDI.mT, offs=ends_E)  # noqa: SLF001


def _quack_apart(x_TD: Tensor, gate_up_S2ID: Tensor, down_SDI: Tensor) -> Tensor:
    narrow_STI = x_TD.new_empty(len(down_SDI), len(x_TD), down_SDI.shape[2])
    for one_2ID, narrow_TI in zip(gate_up_S2ID, narrow_STI, strict=True):
        quack_experts.gate_up(x_TD, one_2ID, narrow_TI)
    return torch.bmm(narrow_STI, down_SDI.mT)


def _torch_apart(x_TD: Tensor, gate_up_S2ID: Tensor, down_SDI: Tensor) -> Tensor:
    """Return what each of S experts makes of every token, [S, T, D]."""
    from kvrelay.kernels.triton_layer import gated  # noqa: PLC0415

    num_apart, hidden, width = down_SDI.shape
    wide_X2I = torch.mm(x_TD, gate_up_S2ID.view(-1, hidden).T).view(-1, 2 * width)  # X = T * S, expert after expert
    narrow_TSI = gated(wide_X2I).view(-1, num_apart, width)
    del wide_X2I
    return torch.bmm(narrow_TSI.transpose(0, 1), down_SDI.mT)
