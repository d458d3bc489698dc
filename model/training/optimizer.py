"""Muon for weight matrices, AdamW for the rest.

Muon (Jordan et al. 2024) orthogonalises each matrix's momentum; the factor 0.2 * sqrt(longer side) gives its
update the size of an AdamW update, so both share one learning rate (Liu et al. 2025, arXiv:2502.16982).
"""

from collections import defaultdict
from typing import Any

import torch
from network import Network
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.1


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return approximately U V^T of each matrix [..., rows, columns], in bfloat16, by five Newton-Schulz steps."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Matrices of one shape are updated as one batch, whatever layer or expert they belong to."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self._groups = list(groups.values())
        self._momenta = [torch.zeros((len(g), *g[0].shape), device=g[0].device) for g in self._groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            grads = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            momentum.lerp_(grads, 1 - _MOMENTUM)
            update = orthogonalise(grads.lerp(momentum, _MOMENTUM))
            scale = 0.2 * max(group[0].shape[-2:]) ** 0.5
            parameters: list[Tensor] = [*group]
            torch._foreach_mul_(parameters, 1 - rate * _WEIGHT_DECAY)
            torch._foreach_add_(parameters, list(update.float().unbind()), alpha=-rate * scale)

    def state_dict(self) -> list[Tensor]:
        return self._momenta

    def load_state_dict(self, state: list[Tensor]) -> None:
        for mine, saved in zip(self._momenta, state, strict=True):
            mine.copy_(saved)


class Optimizer:
    """Both optimizers of a network behind one learning rate."""

    def __init__(self, network: Network) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in network.named_parameters():
            is_matrix = parameter.dim() >= 2 and "embed" not in name and "gate.weight" not in name
            (matrices if is_matrix else others).append(parameter)
        self._muon = Muon(matrices)
        fused = others[0].device.type == "cuda"
        self._adamw = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self._network = network

    def step(self, rate: float) -> Tensor:
        """Clip, update and clear the gradients; return the gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._muon.step(rate)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._network.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])
