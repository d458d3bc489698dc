"""Attention blocks on a GPU through the kernels that others ship: FlashAttention-4 and cuDNN.

Both round their output to the dtype of the queries and give the normaliser in fp32.

Shapes in this file: T query tokens, S keys, N heads, K = nope + R query/key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrelay.kernels.cute_dsl import ONE_AT_A_TIME
from kvrelay.kernels.last_wave import Attended, attend_last_wave_apart, last_wave
from kvrelay.kernels.optional import import_refuses

if TYPE_CHECKING:
    from kvrelay.kernels.mla_prefill import Problem, Ragged

HALVES = (torch.bfloat16, torch.float16)
MLA_WIDTHS = (192, 128)
# Queries and keys of a tile of long causal calls on Hopper. Keys and values are fetched for half as many queries more
# than in the library's own choice of 128, 128: when matrix units take all the power there is, that is faster.
LONG_TILE = (192, 80)
LONG_KEYS = 32_768


def flash4_refuses(problem: Problem) -> str | None:
    """Return None, or the reason FlashAttention-4 cannot run."""
    why = _half_on_cuda(problem)
    if why is not None:
        return why
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return f"is for Hopper and Blackwell, not compute capability {torch.cuda.get_device_capability()}"
    widths = problem.key_width, problem.value_width
    if widths != MLA_WIDTHS and not (widths[0] == widths[1] <= 128 and widths[0] % 8 == 0):
        return f"takes heads of 192/128, or of one width up to 128, not {widths[0]}/{widths[1]}"
    return import_refuses("flash_attn.cute", "flash-attn-4")


def cudnn_refuses(problem: Problem) -> str | None:
    """Return None, or the reason cuDNN cannot run."""
    why = _half_on_cuda(problem)
    if why is not None:
        return why
    if torch.cuda.get_device_capability()[0] < 9:
        return f"needs compute capability 9, this is {torch.cuda.get_device_capability()}"
    if problem.key_width % 8 or problem.value_width % 8 or max(problem.key_width, problem.value_width) > 256:
        return f"takes widths that are multiples of 8 up to 256, not {problem.key_width}/{problem.value_width}"
    return None


def _half_on_cuda(problem: Problem) -> str | None:
    if problem.device != "cuda":
        return f"runs on cuda, not {problem.device}"
    return None if problem.dtype in HALVES else f"takes bf16 and fp16, not {problem.dtype}"


def load_flash4() -> Callable[..., Attended]:
    """Return FlashAttention-4 under the contract of `mla_prefill.attend_block`, but for the output's dtype."""
    # The public name of this function takes no tile.
    from flash_attn.cute.interface import _flash_attn_fwd as flash_attn  # noqa: PLC0415 - optional

    def batched(
        q_BTNK: Tensor,
        k_BSNK: Tensor,
        v_BSNV: Tensor,
        *,
        scale: float,
        causal: bool,
        tile: tuple[int, int] | None = None,
    ) -> Attended:
        with ONE_AT_A_TIME:
            out_BTNV, lse_BNT, *_ = flash_attn(
                q_BTNK, k_BSNK, v_BSNV, softmax_scale=scale, causal=causal, return_lse=True, tile_mn=tile
            )
        return out_BTNV, lse_BNT.transpose(1, 2)

    def attend(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, *, scale: float, causal: bool) -> Attended:
        device = torch.cuda.get_device_properties(q_TNK.device)
        # On Hopper a processor computes one tile at a time. Causal tiles begin with the longest, so their end is even.
        if not causal and device.major == 9:
            wave = last_wave(len(q_TNK), q_TNK.shape[1], len(k_SNK), device.multi_processor_count)
            if wave is not None:
                return attend_last_wave_apart(batched, q_TNK, k_SNK, v_SNV, wave, scale=scale)
        is_long = causal and len(k_SNK) >= LONG_KEYS and device.major == 9
        tile = LONG_TILE if is_long and (q_TNK.shape[2], v_SNV.shape[2]) == MLA_WIDTHS else None
        out_1TNV, lse_1TN = batched(q_TNK[None], k_SNK[None], v_SNV[None], scale=scale, causal=causal, tile=tile)
        return out_1TNV[0], lse_1TN[0]

    return attend


def load_flash4_ragged() -> Callable[..., Attended]:
    """Return the same under the contract of `mla_prefill.attend_ragged`."""
    from flash_attn.cute import flash_attn_varlen_func  # noqa: PLC0415 - optional

    def attend(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, ragged: Ragged, *, scale: float, causal: bool) -> Attended:
        with ONE_AT_A_TIME:
            out_TNV, lse_NT = flash_attn_varlen_func(
                q_TNK, k_SNK, v_SNV,
                cu_seqlens_q=ragged.query_starts,
                cu_seqlens_k=ragged.key_starts,
                max_seqlen_q=max(ragged.queries),
                max_seqlen_k=max(ragged.keys),
                softmax_scale=scale,
                causal=causal,
                return_lse=True,
            )  # fmt: skip
        return out_TNV, lse_NT.transpose(0, 1)

    return attend


def cudnn(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, *, scale: float, causal: bool) -> Attended:
    """cuDNN through torch. Its causal mask starts at the top left, which is ours, as T == S then. A plan is built for
    every new length and each thread, some tens of ms: bucket lengths where that matters."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNK, k_SNK, v_SNV))
    attended = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - the only one that gives the normaliser
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    out_1NTV, lse_1NT = attended[0], attended[1].view(1, q.shape[1], q.shape[2])
    return out_1NTV[0].transpose(0, 1), lse_1NT[0].transpose(0, 1)
