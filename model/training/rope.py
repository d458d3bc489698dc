"""Rotary frequencies, plain and YaRN, as in the published DeepSeek-V3 code."""

import math

import torch
from shape import Shape
from torch import Tensor

BETA_FAST, BETA_SLOW = 32.0, 1.0


def inverse_frequencies(shape: Shape, *, yarn: bool) -> Tensor:
    """Return fp32 [R/2] angles per position.

    YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies that turn more than BETA_FAST times inside the
    training window stay, those under BETA_SLOW are divided by the factor, between them a linear ramp.
    """
    dim = shape.qk_rope_head_dim
    plain = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not yarn:
        return plain

    def correction_dim(turns: float) -> float:
        return dim * math.log(shape.train_window_tokens / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low = max(math.floor(correction_dim(BETA_FAST)), 0)
    high = min(math.ceil(correction_dim(BETA_SLOW)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / shape.yarn_factor * ramp + plain * (1 - ramp)


def softmax_scale(shape: Shape, *, yarn: bool) -> float:
    """Return 1/sqrt(K), times YaRN's squared attention factor (mscale = mscale_all_dim = 1)."""
    mscale = 0.1 * math.log(shape.yarn_factor) + 1.0 if yarn else 1.0
    return shape.qk_head_dim**-0.5 * mscale * mscale


def rotate_pairs(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate interleaved pairs (x0, x1), (x2, x3) ... of the last dimension; the result is half-split."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos_TR - odd * sin_TR, odd * cos_TR + even * sin_TR), dim=-1)
