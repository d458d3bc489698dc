"""Calls of the kernels for a decode step of few tokens; `triton_few` says what they do and names the shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvrelay.core.layout import fp8_groups
from kvrelay.kernels import quant, triton_few, triton_few_experts
from kvrelay.kernels.residual_norm import Norm
from kvrelay.kernels.rope import RopeTables
from kvrelay.kernels.triton_support import num_processors, shared_bytes, starts_early


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of one feed-forward layer; experts behind the router's E take every token, with weight 1."""

    router_ED: Tensor | None  # fp32; None: nothing to choose
    gate_up: Tensor  # [E + always, 2 I, D]
    down: Tensor  # [E + always, D, I]
    top: int = 0  # experts that are chosen, by softmax
    scale: float = 1.0  # on their weights
    normalise: bool = False  # their weights sum to 1 before they are scaled

    @property
    def num_chosen_among(self) -> int:
        return 0 if self.router_ED is None else len(self.router_ED)

    @property
    def always(self) -> int:
        return len(self.down) - self.num_chosen_among


@dataclass(frozen=True, slots=True)
class Tuning:
    """How much of a weight one program asks for at once, by measurement on an H200."""

    linear: tuple[int, int]  # numbers of a tile, warps
    absorb: tuple[int, int]  # columns, warps
    unabsorb: tuple[int, int]  # rows, warps
    gate_up: tuple[int, int, int, int]  # columns of an expert, warps, programs per processor, registers of a thread
    down: tuple[int, int, int]  # rows, bytes asked for at once, how many times that
    head: tuple[int, int]  # numbers of a tile, warps


TUNING = Tuning(
    linear=(8_192, 4),
    absorb=(64, 4),
    unabsorb=(4, 1),
    gate_up=(2, 4, 4, 128),
    down=(16, 32_768, 6),
    head=(32_768, 4),
)


def linear(
    x_TD: Tensor,
    weight_OD: Tensor,
    *,
    norm: Norm | None = None,
    add_TO: Tensor | None = None,
    clears_T: Tensor | None = None,
) -> Tensor:
    """Return x @ weight^T, of the normed x where a norm is given, and on top of `add_TO`.

    Args:
        x_TD: rows may be far apart; all else is contiguous.
        clears_T: int32, made zero, for a kernel behind that counts in it.
    """
    (num_tokens, width), num_rows = x_TD.shape, weight_OD.shape[0]
    out_TO = x_TD.new_empty(num_tokens, num_rows)
    numbers, warps = TUNING.linear
    block = triton.next_power_of_2(width)
    rows = max(1, numbers // block)
    early = starts_early(x_TD.device)
    triton_few.linear_kernel[(triton.cdiv(num_rows, rows), num_tokens)](
        x_TD, weight_OD if norm is None else norm.weight_D, weight_OD, out_TO if add_TO is None else add_TO, out_TO,
        clears_T, x_TD.stride(0), num_rows, width, 0.0 if norm is None else norm.eps,
        NORM=norm is not None, ADD=add_TO is not None, CLEAR=clears_T is not None, ROWS=rows, BLOCK=block, PDL=early,
        num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return out_TO


def absorb_and_store(
    q_TX: Tensor, latent_TC: Tensor, key_TR: Tensor, *, key_up_NPC: Tensor, norm: Norm, tables: RopeTables,
    slots_T: Tensor, pool: Tensor,
) -> Tensor:  # fmt: skip
    """Return absorbed, rotated queries q_TNW and store the tokens' rows, as `triton_rows.write_rows` does.

    Args:
        q_TX: [T, N * (P + R)], not rotated; latents and keys are slices of one product.
    """
    heads, nope_width, latent_width = key_up_NPC.shape
    num_tokens, rope_width = key_TR.shape
    packed = pool.dtype == torch.uint8
    groups = fp8_groups(latent_width) if packed else 1
    views = [pool.view(dtype) for dtype in (quant.NUMBER, torch.float32, torch.bfloat16)] if packed else [pool] * 3
    q_TNW = q_TX.new_empty(num_tokens, heads, latent_width + rope_width)
    columns, warps = TUNING.absorb
    columns = min(columns, triton.next_power_of_2(latent_width))
    early = starts_early(q_TX.device)
    assert latent_TC.stride(0) == key_TR.stride(0), "slices of one product"
    triton_few.absorb_kernel[(triton.cdiv(latent_width, columns), heads + 1, num_tokens)](
        q_TX, latent_TC, key_TR, key_up_NPC, norm.weight_D, tables.cos_TR, tables.sin_TR, slots_T, *views, q_TNW,
        q_TX.stride(0), latent_TC.stride(0), key_up_NPC.stride(0), norm.eps,
        N=heads, P=nope_width, C=latent_width, R=rope_width,
        P_BLOCK=triton.next_power_of_2(nope_width), COLUMNS=columns,
        HALF_BLOCK=triton.next_power_of_2(rope_width // 2), GROUPS=groups,
        GROUP_BLOCK=triton.next_power_of_2(triton.cdiv(latent_width, groups)),
        R_BLOCK=triton.next_power_of_2(rope_width),
        LATENT_STRIDE=views[0].shape[-1], SCALE_STRIDE=views[1].shape[-1], ROPE_STRIDE=views[2].shape[-1],
        PACKED=packed, PDL=early, num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return q_TNW


def unabsorb(out_TNC: Tensor, value_up_NCV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [T, N * V] of attention outputs that are still in latent space."""
    num_tokens, heads, latent_width = out_TNC.shape
    value_width = value_up_NCV.shape[2]
    assert value_up_NCV.stride()[1:] == (1, latent_width), "the numbers of one value are neighbours"
    out_TX = torch.empty(num_tokens, heads * value_width, dtype=dtype, device=out_TNC.device)
    rows, warps = TUNING.unabsorb
    rows = min(rows, triton.next_power_of_2(value_width))
    early = starts_early(out_TNC.device)
    triton_few.unabsorb_kernel[(triton.cdiv(value_width, rows), heads, num_tokens)](
        out_TNC, value_up_NCV, out_TX, value_up_NCV.stride(0),
        N=heads, C=latent_width, V=value_width, ROWS=rows, BLOCK=triton.next_power_of_2(latent_width), PDL=early,
        num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return out_TX


def add_experts(hidden_TD: Tensor, norm: Norm, experts: Experts, arrived_T: Tensor) -> Tensor:
    """Return hidden + the experts' answer to its norm, summed in fp32.

    Args:
        arrived_T: int32, zeros once the kernel in front has ended; see `linear`.
    """
    num_tokens, hidden = hidden_TD.shape
    device, early = hidden_TD.device, starts_early(hidden_TD.device)
    num_experts, top, width = experts.num_chosen_among, experts.top, experts.down.shape[2]
    each = top + experts.always
    gated = hidden_TD.new_empty(num_tokens, each, width)
    logits_TE = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device)
    ids_TK = torch.empty(num_tokens, top, dtype=torch.int32, device=device)
    weights_TK = torch.empty(num_tokens, top, dtype=torch.float32, device=device)
    columns, warps, per_processor, registers = TUNING.gate_up
    programs = min(num_processors(device) * per_processor, triton.cdiv(width, columns) * each)
    triton_few_experts.gate_up_kernel[(programs, num_tokens)](
        hidden_TD, norm.weight_D, norm.weight_D if experts.router_ED is None else experts.router_ED, logits_TE,
        arrived_T, experts.gate_up, ids_TK, weights_TK, gated, norm.eps, experts.scale,
        hidden=hidden, width=width, E=num_experts, E_BLOCK=triton.next_power_of_2(max(1, num_experts)), TOP=top,
        ALWAYS=experts.always, NORMALISE=experts.normalise, COLUMNS=columns, BLOCK=triton.next_power_of_2(hidden),
        ALONE=device.type == "cpu", PDL=early, num_warps=warps, num_stages=1, maxnreg=registers, launch_pdl=early,
    )  # fmt: skip
    rows, stage_bytes, stages = TUNING.down
    stages = min(stages, max(1, shared_bytes(device) // stage_bytes - 1))
    parts = max(1, 8 // triton.next_power_of_2(each))
    warps = parts * triton.next_power_of_2(each)
    span = -(-width // (8 * parts)) * 8  # whole loads of 16 bytes
    depth = max(16, stage_bytes // (warps * rows * experts.down.element_size()))
    out_TD = torch.empty_like(hidden_TD)
    triton_few_experts.down_kernel[(triton.cdiv(hidden, rows), num_tokens)](
        gated, ids_TK, weights_TK, experts.down, hidden_TD, out_TD, num_experts,
        hidden=hidden, width=width, TOP=top, ALWAYS=experts.always, X=warps, PARTS=parts, SPAN=span, ROWS=rows,
        DEPTH=min(depth, max(16, triton.next_power_of_2(span))), STAGES=stages, PDL=early,
        num_warps=warps, num_stages=stages, launch_pdl=early,
    )  # fmt: skip
    return out_TD


def head(hidden_TD: Tensor, norm: Norm, weight_VD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits_TV fp32, their maxima (infinite where one is not a number) and where those are, int64."""
    (num_tokens, hidden), num_rows = hidden_TD.shape, weight_VD.shape[0]
    numbers, warps = TUNING.head
    block = triton.next_power_of_2(hidden)
    rows = max(1, numbers // block)
    blocks = triton.cdiv(num_rows, rows)
    device = hidden_TD.device
    logits_TV = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=device)
    peaks = torch.empty(num_tokens, blocks, dtype=torch.float32, device=device)
    places = torch.empty(num_tokens, blocks, dtype=torch.int32, device=device)
    best_T = torch.empty(num_tokens, dtype=torch.float32, device=device)
    chosen_T = torch.empty(num_tokens, dtype=torch.int64, device=device)
    early = starts_early(device)
    triton_few.head_kernel[(blocks, num_tokens)](
        hidden_TD, norm.weight_D, weight_VD, logits_TV, peaks, places, num_rows, hidden, norm.eps, blocks,
        ROWS=rows, BLOCK=block, PDL=early, num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    triton_few.best_kernel[(num_tokens,)](
        peaks, places, best_T, chosen_T, blocks, BLOCK=min(8192, triton.next_power_of_2(blocks)), PDL=early,
        num_warps=16, launch_pdl=early,
    )  # fmt: skip
    return logits_TV, best_T, chosen_T
