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


class Attend(Protocol):
    def __call__(
        self, q_BNW: Tensor, pool_PSW: Tensor, plan: PagedPlan, /, *, scale: float, latent_width: int
    ) -> Tensor: ...


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
    if num_heads % 64:
        return f"works on 64 heads at a time, of which {num_heads} fill a part: ours are faster there"
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
