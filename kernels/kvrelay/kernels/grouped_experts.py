"""Routed experts on a GPU without the host knowing who goes where: nothing waits, and a graph can record it.

Shapes in this file: T tokens, D hidden, E experts, S experts that every token goes to, I expert width,
K experts chosen per token, A = T * K pairs, X = S * I.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
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
    down_apart_DX: Tensor | None = None,
    into_TD: Tensor | None = None,
) -> Tensor:
    """Return per token the weighted sum of its experts' gated MLPs.

    Args:
        x_TD: bf16.
        weights_TK: fp32.
        experts_TK: int64.
        down_apart_DX: when given, the last S experts of the stacks are not chosen: every token goes to them with
            weight 1, and none is copied for them. Their last products, X = S * I, side by side: so they are one.
        into_TD: contiguous, receives the sum on top of what it holds, and is returned.
    """
    from kvrelay.kernels.triton_layer import combine  # noqa: PLC0415 - CPUs need no Triton
    from kvrelay.kernels.triton_order import expert_order  # noqa: PLC0415

    if len(x_TD) <= FEW_TOKENS and down_apart_DX is None:
        from kvrelay.kernels.triton_experts import few_tokens_experts  # noqa: PLC0415

        return few_tokens_experts(x_TD, weights_TK, experts_TK, gate_up_E2ID, down_EDI, into_TD=into_TD)
    num_chosen = len(gate_up_E2ID) - (0 if down_apart_DX is None else down_apart_DX.shape[1] // down_EDI.shape[2])
    order = expert_order(experts_TK, num_chosen)
    chosen, apart = (_quack_chosen, _quack_apart) if _takes_quack(x_TD, down_EDI) else (_torch_chosen, _torch_apart)
    out_AD = chosen(x_TD, order, gate_up_E2ID[:num_chosen], down_EDI[:num_chosen])
    more_TD = None if down_apart_DX is None else F.linear(apart(x_TD, gate_up_E2ID[num_chosen:]), down_apart_DX)
    return combine(out_AD, order.places_TK, weights_TK, more_TD=more_TD, into_TD=into_TD)


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


def _quack_apart(x_TD: Tensor, gate_up_S2ID: Tensor) -> Tensor:
    """Return silu(gate) * up of each of S experts and every token, side by side: [T, S * I]."""
    num_apart, width = len(gate_up_S2ID), gate_up_S2ID.shape[1] // 2
    narrow_TSI = x_TD.new_empty(len(x_TD), num_apart, width)
    for expert in range(num_apart):
        quack_experts.gate_up(x_TD, gate_up_S2ID[expert], narrow_TSI[:, expert])
    return narrow_TSI.flatten(1)


def _torch_apart(x_TD: Tensor, gate_up_S2ID: Tensor) -> Tensor:
    """As `_quack_apart`."""
    from kvrelay.kernels.triton_layer import gated  # noqa: PLC0415

    num_apart, width = len(gate_up_S2ID), gate_up_S2ID.shape[1] // 2
    wide_TX = torch.mm(x_TD, gate_up_S2ID.flatten(0, 1).T)
    return gated(wide_TX.view(-1, 2 * width)).view(-1, num_apart * width)
