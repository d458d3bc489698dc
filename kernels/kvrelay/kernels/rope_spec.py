"""What decides a rotation: the kinds of rope, their numbers, and the scales that follow. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"  # NTK: the base grows with the length
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """What decides the rotation; filled from a checkpoint's config."""

    kind: RopeKind
    width: int  # R
    theta: float
    factor: float = 1.0
    original_max_tokens: int = 0  # length of the original training; yarn and dynamic read it
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn; 0 = not given
    mscale_all_dim: float = 0.0  # 0 = not given
    attention_factor: float | None = None  # yarn; overrides what mscale gives

    @property
    def table_scale(self) -> float:
        """Factor on cos and sin, so on the rope part of the scores only. Source: YaRN, arXiv:2309.00071."""
        if self.kind is not RopeKind.YARN:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """Factor on all scores. Source: DeepSeek's model code, which squares its one mscale."""
        if self.kind is RopeKind.DEFAULT or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
