"""Norms of rows, and the residual sum with the norm behind it, in one pass where there is a GPU.

Shapes in this file: T tokens, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    weight_D: Tensor
    eps: float


def rms_norm(hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of rows times the weight, fp32 inside, in the dtype of `hidden_TD`."""
    if hidden_TD.is_cuda:
        from kvrelay.kernels.triton_layer import rms_norm as ours  # noqa: PLC0415 - CPUs need no Triton

        return ours(hidden_TD, weight_D, eps)
    return F.rms_norm(hidden_TD, hidden_TD.shape[-1:], weight_D, eps)


def add_rms_norm(hidden_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (sum_TD, normed_TD): hidden + delta, and its RMS norm times the weight.

    Both have the dtype of `hidden_TD`; the sum is rounded to it before it is normalised, and the norm is fp32 inside.
    """
    if hidden_TD.is_cuda:
        from kvrelay.kernels.triton_layer import add_rms_norm as fused  # noqa: PLC0415 - CPUs need no Triton

        return fused(hidden_TD, delta_TD, weight_D, eps)
    sum_TD = hidden_TD + delta_TD
    return sum_TD, F.rms_norm(sum_TD, sum_TD.shape[-1:], weight_D, eps)
