"""Latent rows in 8 bits: e4m3 numbers, one scale per 128 of them, and the rope part as it was.

Bytes of a row: C numbers in float8 e4m3; one fp32 scale per group of 128 (of all C when there are fewer); R rope
numbers in bf16. For 512 + 64 that is 512 + 16 + 128 = 656, against 1,152 in bf16. Rope keys have outliers: they stay.

Scales are powers of two: number times scale is then exact in bf16, so a kernel over these rows gives what it would
give over `dequantise`'s rows, and the only error is the rounding below.

Error of one latent number x in a group whose largest magnitude is a: at most max(|x| / 16, a / 2 ** 17). (e4m3 has
three bits behind the point: half a step is 1/16 of the value at most. Below its smallest normal number, 2 ** -6 scaled,
steps are 2 ** -9 scaled, half of which is at most 2 ** -10 * 2 a / 448 < a / 2 ** 17.)

Shapes in this file: T rows, C latent, R rope, W = C + R, G groups, Y bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay.core.layout import fp8_groups

LARGEST = 448.0  # of e4m3
NUMBER = torch.float8_e4m3fn


def quantise(rows_TW: Tensor, *, latent_width: int) -> Tensor:
    """Return bytes_TY, uint8, of rows in any float dtype; the reference of the fused kernel."""
    latent_TC, rope_TR = rows_TW[:, :latent_width], rows_TW[:, latent_width:]
    num_groups = fp8_groups(latent_width)
    latent_TGX = latent_TC.float().reshape(-1, num_groups, latent_width // num_groups)
    largest_TG = latent_TGX.abs().amax(-1).clamp(min=1e-30)
    scale_TG = torch.exp2(torch.ceil(torch.log2(largest_TG / LARGEST)))
    number_TC = (latent_TGX / scale_TG[..., None]).clamp(-LARGEST, LARGEST).to(NUMBER).flatten(1)
    parts = (number_TC, scale_TG, rope_TR.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def dequantise(bytes_TY: Tensor, *, latent_width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return rows_TW; exact in bf16 and fp32."""
    num_groups = fp8_groups(latent_width)
    rope_at = latent_width + 4 * num_groups
    number_TC = bytes_TY[:, :latent_width].contiguous().view(NUMBER).float()
    scale_TG = bytes_TY[:, latent_width:rope_at].contiguous().view(torch.float32)
    rope_TR = bytes_TY[:, rope_at:].contiguous().view(torch.bfloat16)
    number_TGX = number_TC.view(-1, num_groups, latent_width // num_groups)
    latent_TC = (number_TGX * scale_TG[..., None]).flatten(1)
    return torch.cat((latent_TC.to(dtype), rope_TR.to(dtype)), 1)
