"""FlashMLA's dense decode kernel for Hopper, from the sgl-flash-mla package.

Shapes in this file: B sequences, P pages, S page_tokens, N heads, C latent, W = C + R.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvrelay.kernels.cuda_choice import input_refuses
from kvrelay.kernels.optional import import_refuses
from kvrelay.kernels.paged_plan import PagedPlan

_MODULE = "flash_mla.flash_mla_interface"
_KEY = "flashmla"
_HEADS = 64  # of one of its blocks
_MANY_SEQUENCES = 32


class Attend(Protocol):
    def __call__(
        self, q_BNW: Tensor, pool_PSW: Tensor, plan: PagedPlan, /, *, scale: float, latent_width: int
    ) -> Tensor: ...


def flashmla_is_slower(num_heads: int, num_sequences: int) -> str | None:
    """Return None, or why our own kernels are to be preferred where they run.

    H200, our time over its own: 0.86 to 0.97 with 64 heads; with 128: 0.89 (1 sequence of 128K), 0.91 (8 of 2K), 1.05
    (32 of 8K), 1.16 (64 of 4K).
    """
    if num_heads <= _HEADS:
        return f"ours are faster with {num_heads} heads"
    if num_sequences < _MANY_SEQUENCES:
        return f"ours are faster for {num_sequences} sequences"
    return None


def flashmla_refuses(
    device: str, dtype: torch.dtype, num_heads: int, latent_width: int, row_width: int, page_tokens: int
) -> str | None:
    """Return None, or the reason it cannot or should not run."""
    if (why := input_refuses(device, latent_width, row_width)) is not None:
        return why
    if torch.cuda.get_device_capability()[0] != 9:
        return f"its dense kernel is for Hopper, not compute capability {torch.cuda.get_device_capability()}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 and fp16, not {dtype}"
    if page_tokens != 64:
        return f"takes pages of 64 rows, not {page_tokens}"
    if num_heads % _HEADS:
        return f"works on {_HEADS} heads at a time, of which {num_heads} fill a part: ours are faster there"
    return import_refuses(_MODULE, "sgl-flash-mla")


def load_flashmla() -> Attend:
    """Return its kernel under the contract of `mla_decode.mla_decode`, but that it reads a paged plan."""
    from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache  # noqa: PLC0415 - optional

    def attend(q_BNW: Tensor, pool_PSW: Tensor, plan: PagedPlan, *, scale: float, latent_width: int) -> Tensor:
        # Its own schedule is made in the first layer of a step, on the device, and shared by the others.
        schedule = plan.derived.setdefault(_KEY, FlashMLASchedMeta())
        out_B1NC, _ = flash_mla_with_kvcache(
            q_BNW[:, None].to(pool_PSW.dtype),
            pool_PSW[:, :, None],
            plan.page_table_BP,
            plan.lengths_B,
            latent_width,
            schedule,
            softmax_scale=scale,
            use_legacy=True,
        )
        out_BNC: Tensor = out_B1NC[:, 0].to(q_BNW.dtype)
        return out_BNC

    return attend
