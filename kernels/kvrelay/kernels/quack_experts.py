"""Products of experts through QuACK's kernels for Hopper: they read tokens where they are, and gate what they store.

Neither copies of tokens in the order of experts nor halves that are not gated yet go through memory.

Shapes in this file: T tokens, D hidden, E experts, I expert width, A (token, expert) pairs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvrelay.kernels.cute_dsl import ONE_AT_A_TIME
from kvrelay.kernels.optional import import_refuses

if TYPE_CHECKING:
    from kvrelay.kernels.triton_order import ExpertOrder

# The fastest of seven kinds of tile on an H200, at 8,192 and 32,768 tokens with DeepSeek-V2-Lite's widths.
_LARGE_TILES = {"tile_m": 128, "tile_n": 256, "pingpong": False}
_TURNS = {"tile_m": 128, "tile_n": 192, "pingpong": True}  # one tile is stored while the next is computed


@functools.cache
def quack_refuses(device: torch.device) -> str | None:
    """Return None, or the reason these kernels cannot run."""
    if device.type != "cuda":
        return f"runs on cuda, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return f"is tuned for Hopper, not compute capability {capability}"
    return import_refuses("quack.epilogue.library", "quack-kernels")


def chosen_gate_up(x_TD: Tensor, order: ExpertOrder, gate_up_E2ID: Tensor) -> Tensor:
    """Return silu(gate) * up of all pairs [A, I], in order."""
    return _gated(
        x_TD, gate_up_E2ID, _LARGE_TILES, cu_seqlens_m=order.bounds_E1, A_idx=order.tokens_A, postact_out=None
    )


def chosen_down(narrow_AI: Tensor, order: ExpertOrder, down_EDI: Tensor) -> Tensor:
    """Return the last product of all pairs [A, D], in order."""
    from quack.gemm_interface import gemm_tuned  # noqa: PLC0415 - optional

    out_AD = narrow_AI.new_empty(len(narrow_AI), down_EDI.shape[1])
    with ONE_AT_A_TIME:
        gemm_tuned.fn(narrow_AI, down_EDI.transpose(1, 2), out_AD, cu_seqlens_m=order.bounds_E1, config=_tiles(_TURNS))
    return out_AD


def gate_up(x_TD: Tensor, gate_up_2ID: Tensor, out_TI: Tensor) -> None:
    """Write silu(gate) * up of one gated MLP."""
    _gated(x_TD, gate_up_2ID, _TURNS, cu_seqlens_m=None, A_idx=None, postact_out=out_TI)


def _gated(x_TD: Tensor, gate_up: Tensor, tiles: dict[str, Any], **where: Tensor | None) -> Tensor:
    from quack.gemm_interface import gemm_act  # noqa: PLC0415 - optional

    with ONE_AT_A_TIME:
        _, narrow = gemm_act(
            x_TD, gate_up.mT, activation="swiglu", store_preact=False, concat_layout=("B",), tuned=False,
            config=_tiles(tiles), **where,
        )  # fmt: skip
    assert isinstance(narrow, Tensor), "the gated halves are wanted"
    return narrow


def _tiles(tiles: dict[str, Any]) -> Any:  # a type of an optional library
    from quack.gemm_config import GemmConfig  # noqa: PLC0415 - optional

    return GemmConfig(**tiles, cluster_m=2, cluster_n=1, is_dynamic_persistent=False, device_capacity=9)
