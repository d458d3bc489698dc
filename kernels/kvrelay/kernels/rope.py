"""Rotary positions: frequencies of every scaling kind, tables per step, and the rotation itself.

In memory the R rope numbers are always half-split: element j is paired with element j + R/2. Checkpoints that store
interleaved pairs are permuted once, at load, so nothing here ever interleaves.

Shapes in this file: T tokens, R rope width, F = R/2 frequencies, X any further axes between T and R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.kernels.rope_spec import RopeKind, RopeSpec


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines and sines of some tokens, fp32, made once per step and used by all layers."""

    cos_TR: Tensor
    sin_TR: Tensor  # the first half carries the minus sign of the rotation


class Rope:
    """Makes tables for one spec on one device."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        half = torch.arange(0, spec.width, 2, dtype=torch.int64).float() / spec.width
        self._exponents_F = half.to(device)
        self._frequencies_F = inverse_frequencies(spec).to(device)

    def tables(self, positions_T: Tensor, ntk_tokens: Tensor | int) -> RopeTables:
        """Return the tables of tokens at `positions_T`.

        Args:
            positions_T: int64, absolute positions.
            ntk_tokens: length that sets the base of dynamic NTK, one for all tokens or int64 [T]; other kinds ignore
                it. Prefill gives the whole prompt length in every chunk, decode the current length.
        """
        if positions_T.is_cuda and self.spec.kind is not RopeKind.DYNAMIC:
            from kvrelay.kernels.triton_layer import rope_tables  # noqa: PLC0415 - CPUs need no Triton

            return RopeTables(*rope_tables(positions_T, self._frequencies_F, self.spec.table_scale))
        angles_TF = positions_T.float()[:, None] * self._frequencies(ntk_tokens)
        cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
        if (scale := self.spec.table_scale) != 1.0:
            cos_TF, sin_TF = cos_TF * scale, sin_TF * scale
        return RopeTables(torch.cat((cos_TF, cos_TF), -1), torch.cat((-sin_TF, sin_TF), -1))

    def _frequencies(self, ntk_tokens: Tensor | int) -> Tensor:
        spec = self.spec
        if spec.kind is not RopeKind.DYNAMIC:
            return self._frequencies_F
        if isinstance(ntk_tokens, int):
            if ntk_tokens <= spec.original_max_tokens:
                return self._frequencies_F
            ntk_tokens = torch.tensor([ntk_tokens], device=self._exponents_F.device)
        stretch_T = ntk_tokens.clamp(min=spec.original_max_tokens).double() / spec.original_max_tokens
        growth_T = spec.factor * stretch_T - (spec.factor - 1)
        base_T = (spec.theta * growth_T ** (spec.width / (spec.width - 2))).float()
        return 1.0 / base_T[:, None] ** self._exponents_F


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Return the F inverse frequencies, fp32 on the CPU; dynamic NTK as it is within its window."""
    exponents_F = torch.arange(0, spec.width, 2, dtype=torch.int64).float() / spec.width
    plain_F = 1.0 / spec.theta**exponents_F
    if spec.kind is RopeKind.LINEAR:
        return plain_F / spec.factor
    if spec.kind is RopeKind.YARN:
        keep_F = 1.0 - _yarn_ramp(spec)
        return plain_F / spec.factor * (1 - keep_F) + plain_F * keep_F
    return plain_F


def _yarn_ramp(spec: RopeSpec) -> Tensor:
    """Return 0 for fast dimensions, which keep their frequency, up to 1 for slow ones, which are interpolated."""

    def dimension_of(rotations: float) -> float:
        turns = spec.original_max_tokens / (rotations * 2 * math.pi)
        return spec.width * math.log(turns) / (2 * math.log(spec.theta))

    low = max(math.floor(dimension_of(spec.beta_fast)), 0)
    high: float = min(math.ceil(dimension_of(spec.beta_slow)), spec.width - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    return ((torch.arange(spec.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def apply_rope(x_TXR: Tensor, tables: RopeTables) -> Tensor:
    """Rotate the last axis of [T, R] or [T, N, R]; computed in fp32, returned in the dtype of `x_TXR`."""
    cos, sin = tables.cos_TR, tables.sin_TR
    if x_TXR.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    x = x_TXR.float()
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
    return turned.to(x_TXR.dtype)


def half_split_order(width: int) -> Tensor:
    """Return the permutation p such that interleaved[p] is half-split: all even elements, then all odd ones."""
    order = torch.arange(width)
    return torch.cat((order[0::2], order[1::2]))
