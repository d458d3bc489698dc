"""Feed-forward layers: one gated MLP, or experts chosen per token.

Shapes in this file: T tokens, D hidden, E experts, G groups of experts, I expert width, K experts per token,
A = T * K (token, expert) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.kernels.experts_choice import FEW_TOKENS, expert_logits, softmax_experts, with_always
from kvrelay.kernels.grouped_experts import grouped_experts, grouped_experts_refuse
from kvrelay.kernels.residual_norm import Norm
from kvrelay.model.config import MoeConfig, Routing

# From here on the experts that see every token are one dense product: fewer launches matter no longer, copies do.
APART_TOKENS = 1024


class FeedForward(Protocol):
    def __call__(self, x_TD: Tensor) -> Tensor: ...

    def add_to(self, hidden_TD: Tensor, x_TD: Tensor) -> None:
        """Add this layer's answer to `x_TD` to hidden, in place."""

    def few_refuses(self) -> str | None:
        """Return None, or the reason why `add_few` cannot run."""

    def add_few(self, hidden_TD: Tensor, norm: Norm, arrived_T: Tensor) -> Tensor:
        """Return hidden + this layer's answer to its norm, for few tokens of a decode step on a GPU.

        Args:
            arrived_T: see `few_tokens.add_experts`.
        """


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    gate_up: Tensor  # [2 I, D]
    down: Tensor  # [D, I]

    def __call__(self, x_TD: Tensor) -> Tensor:
        return F.linear(_gated(F.linear(x_TD, self.gate_up)), self.down)

    def add_to(self, hidden_TD: Tensor, x_TD: Tensor) -> None:
        hidden_TD.add_(self(x_TD))

    def few_refuses(self) -> str | None:
        return None

    def add_few(self, hidden_TD: Tensor, norm: Norm, arrived_T: Tensor) -> Tensor:
        from kvrelay.kernels.few_tokens import Experts, add_experts  # noqa: PLC0415 - CPUs need no Triton

        # The one expert that every token goes to.
        return add_experts(hidden_TD, norm, Experts(None, self.gate_up[None], self.down[None]), arrived_T)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts, always in fp32."""

    config: MoeConfig
    weight_ED: Tensor  # fp32
    bias_E: Tensor | None  # fp32, added for the choice only
    num_always: int = 0  # shared experts that stand behind the others and see every token
    parts_PED: Tensor | None = None  # `bf16_parts` of the weight, where products of bf16 can use them

    def __call__(self, x_TD: Tensor, *, names_always: bool = True) -> tuple[Tensor, Tensor]:
        """Return (weights_TK fp32, experts_TK int64); the experts for every token are among them only when named."""
        config = self.config
        num_always = self.num_always if names_always else 0
        logits_TE = expert_logits(x_TD, self.weight_ED, self.parts_PED)
        if config.routing is Routing.SOFTMAX_GREEDY:
            return softmax_experts(
                logits_TE,
                num_chosen=config.experts_per_token,
                scale=config.weight_scale,
                normalise=config.normalise_weights,
                num_always=num_always,
            )
        if config.routing is Routing.SIGMOID_NOAUX:
            assert self.bias_E is not None, "noaux_tc has a bias"
            scores_TE = logits_TE.sigmoid()
            choice_TE = self._eligible(scores_TE + self.bias_E, best_of_group=2, masked=-torch.inf)
        else:
            scores_TE = logits_TE.softmax(-1)
            choice_TE = self._eligible(scores_TE, best_of_group=1, masked=0.0)
        experts_TK = choice_TE.topk(config.experts_per_token, sorted=False).indices
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.normalise_weights:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * config.weight_scale
        return with_always(weights_TK, experts_TK, first=config.num_experts, num_always=num_always)

    def _eligible(self, scores_TE: Tensor, *, best_of_group: int, masked: float) -> Tensor:
        """Mask the experts outside each token's best groups; a group counts by its `best_of_group` best experts."""
        config = self.config
        if config.groups_per_token == config.num_groups:
            return scores_TE
        grouped = scores_TE.view(-1, config.num_groups, config.num_experts // config.num_groups)
        group_scores_TG = grouped.topk(min(best_of_group, grouped.shape[-1])).values.sum(-1)
        best_groups = group_scores_TG.topk(config.groups_per_token, sorted=False).indices
        hidden_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, best_groups, False)
        return grouped.masked_fill(hidden_TG[..., None], masked).flatten(1)


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts, plus shared ones that see every token, unweighted.

    Shared experts are an MLP of their own, or stand behind the routed ones and are among each token's K.
    """

    router: Router
    gate_up: Tensor  # [E, 2 I, D]
    down: Tensor  # [E, D, I]
    shared: GatedMlp | None
    down_always: Tensor | None = None  # [D, S * I], `down` of the S shared experts that stand behind, side by side

    def __call__(self, x_TD: Tensor) -> Tensor:
        if grouped_experts_refuse(x_TD) is None:
            routed_TD = self._grouped(x_TD)
        else:
            routed_TD = self._routed(x_TD, *self.router(x_TD))
        return routed_TD if self.shared is None else routed_TD + self.shared(x_TD)

    def add_to(self, hidden_TD: Tensor, x_TD: Tensor) -> None:
        if self.shared is None and hidden_TD.is_contiguous() and grouped_experts_refuse(x_TD) is None:
            self._grouped(x_TD, hidden_TD)
        else:
            hidden_TD.add_(self(x_TD))

    def few_refuses(self) -> str | None:
        if self.router.config.routing is not Routing.SOFTMAX_GREEDY:
            return f"chooses by softmax alone, not {self.router.config.routing.value}"
        return None if self.shared is None else "shared experts stand apart"

    def add_few(self, hidden_TD: Tensor, norm: Norm, arrived_T: Tensor) -> Tensor:
        from kvrelay.kernels.few_tokens import Experts, add_experts  # noqa: PLC0415

        config = self.router.config
        experts = Experts(
            self.router.weight_ED, self.gate_up, self.down, top=config.experts_per_token, scale=config.weight_scale,
            normalise=config.normalise_weights,
        )  # fmt: skip
        return add_experts(hidden_TD, norm, experts, arrived_T)

    def _grouped(self, x_TD: Tensor, into_TD: Tensor | None = None) -> Tensor:
        down_apart_DX = self.down_always if len(x_TD) >= APART_TOKENS else None
        weights_TK, experts_TK = self.router(x_TD, names_always=down_apart_DX is None)
        return grouped_experts(
            x_TD, weights_TK, experts_TK, self.gate_up, self.down,
            down_apart_DX=down_apart_DX, into_TD=into_TD,
        )  # fmt: skip

    def _routed(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Sort the pairs by expert, so that each expert that is hit works on one contiguous slice."""
        if x_TD.is_cuda and x_TD.shape[0] <= FEW_TOKENS:
            return self._gathered(x_TD, weights_TK, experts_TK)
        num_tokens, per_token = experts_TK.shape
        experts_A = experts_TK.flatten()
        order_A = experts_A.argsort()
        counts = experts_A.bincount(minlength=self.gate_up.shape[0]).tolist()
        x_AD = x_TD.index_select(0, order_A // per_token)
        wide = x_AD.new_empty(len(x_AD), self.gate_up.shape[1])
        slices = _slices(counts)
        for expert, start, end in slices:
            torch.mm(x_AD[start:end], self.gate_up[expert].T, out=wide[start:end])
        narrow = _gated(wide)
        out_AD = x_AD  # its numbers are no longer needed
        for expert, start, end in slices:
            torch.mm(narrow[start:end], self.down[expert].T, out=out_AD[start:end])
        back_A = torch.empty_like(order_A).scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))
        out_TKD = out_AD.index_select(0, back_A).view(num_tokens, per_token, -1)
        return torch.bmm(weights_TK[:, None], out_TKD.float())[:, 0].to(x_TD.dtype)

    def _gathered(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Copy the weights of each pair's expert: slow, but the host need not know who goes where."""
        num_tokens, per_token = experts_TK.shape
        experts_A = experts_TK.flatten()
        x_AD = x_TD.repeat_interleave(per_token, 0)
        wide = torch.bmm(self.gate_up.index_select(0, experts_A), x_AD[..., None])[..., 0]
        out_AD = torch.bmm(self.down.index_select(0, experts_A), _gated(wide)[..., None])[..., 0]
        out_TKD = out_AD.view(num_tokens, per_token, -1)
        return torch.bmm(weights_TK[:, None], out_TKD.float())[:, 0].to(x_TD.dtype)


def _gated(wide: Tensor) -> Tensor:
    if wide.is_cuda:
        from kvrelay.kernels.triton_layer import gated  # noqa: PLC0415 - CPUs need no Triton

        return gated(wide)
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate) * up


def _slices(counts: list[int]) -> list[tuple[int, int, int]]:
    """Return (expert, start, end) of the experts with at least one pair."""
    slices = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            slices.append((expert, start, start + count))
            start += count
    return slices
