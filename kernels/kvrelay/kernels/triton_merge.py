"""`merge.merge_partials` in one pass over its inputs.

Shapes in this file: T query tokens, N heads, V value width, X = T * N rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of one program


def merge(
    out_a_TNV: Tensor, lse_a_TN: Tensor, out_b_TNV: Tensor, lse_b_TN: Tensor, *, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Contract of `merge.merge_partials`; normalisers may have any strides.

    Args:
        into: fp32 and contiguous, receives the output; may be `out_a_TNV` itself.
    """
    num_tokens, num_heads, width = out_a_TNV.shape
    out_a_TNV, out_b_TNV = out_a_TNV.contiguous(), out_b_TNV.contiguous()
    out_TNV = (
        torch.empty_like(out_a_TNV, dtype=torch.float32, memory_format=torch.contiguous_format)
        if into is None
        else into
    )
    assert out_TNV.dtype == torch.float32, "the output is fp32"
    assert out_TNV.is_contiguous(), "the output is contiguous"
    lse_TN = torch.empty_like(out_a_TNV[..., 0], dtype=torch.float32, memory_format=torch.contiguous_format)
    _merge[(triton.cdiv(num_tokens * num_heads, ROWS),)](
        out_a_TNV,
        lse_a_TN,
        out_b_TNV,
        lse_b_TN,
        out_TNV,
        lse_TN,
        num_tokens * num_heads,
        num_heads,
        *lse_a_TN.stride(),
        *lse_b_TN.stride(),
        V=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=ROWS,
    )
    return out_TNV, lse_TN


@triton.jit
def _merge(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    num_heads,
    a_token_stride,
    a_head_stride,
    b_token_stride,
    b_head_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row_X = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here_X = row_X < num_rows
    token_X, head_X = row_X // num_heads, row_X % num_heads
    lse_a_X = tl.load(lse_a_ptr + token_X * a_token_stride + head_X * a_head_stride, here_X, other=0.0)
    lse_b_X = tl.load(lse_b_ptr + token_X * b_token_stride + head_X * b_head_stride, here_X, other=0.0)
    top_X = tl.maximum(lse_a_X, lse_b_X)
    ref_X = tl.where(top_X == -float("inf"), 0.0, top_X)  # -inf - -inf would be nan
    w_a_X, w_b_X = tl.exp(lse_a_X - ref_X), tl.exp(lse_b_X - ref_X)
    sum_X = w_a_X + w_b_X
    share_X = tl.where(sum_X > 0, 1 / sum_X, 0.0)
    col_V = tl.arange(0, BLOCK)
    cell_XV = row_X[:, None] * V + col_V[None, :]
    mask_XV = here_X[:, None] & (col_V < V)[None, :]
    a_XV = tl.load(out_a_ptr + cell_XV, mask_XV, other=0.0).to(tl.float32)
    b_XV = tl.load(out_b_ptr + cell_XV, mask_XV, other=0.0).to(tl.float32)
    out_XV = a_XV * (w_a_X * share_X)[:, None] + b_XV * (w_b_X * share_X)[:, None]
    tl.store(out_ptr + cell_XV, out_XV, mask_XV)
    tl.store(lse_ptr + row_X, ref_X + tl.log(sum_X), here_X)
