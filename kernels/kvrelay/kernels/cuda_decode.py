"""Split decode attention over 8-bit latent rows, in CUDA C++ (cuda/decode.cu), for 16 heads a block.

The line of tiles is cut into parts, and pieces are numbered and joined, as in `triton_decode`.

Shapes in this file: B sequences, J pieces, P pages, S rows of a page, Y bytes of a row, N heads, C latent, W = C + R.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.kernels import nvrtc, triton_join
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.triton_support import num_processors

SOURCE = Path(__file__).with_name("cuda") / "decode.cu"
HEADS = 16  # of one block
THREADS = 256
STAGES = 5  # tiles of 64 rows in a block's memory: as many as fit
SHARED_BYTES = 227 * 1024  # of a block: all that Hopper gives one


class Arguments(ctypes.Structure):
    """`Args` of the source, and the second half of those of heads.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "pool", "table", "lengths", "starts", "out", "pieces", "lse")),
        *((name, ctypes.c_int) for name in ("num_sequences", "table_stride", "num_heads", "starts_early")),
        ("scale_log2", ctypes.c_float),
    )

    @classmethod
    def of(
        cls, q_BNW: Tensor, pool_PSY: Tensor, plan: PagedPlan, into: Results, *, scale: float, early: bool
    ) -> Arguments:
        """Point at tensors, which must outlive the launch."""
        return cls(
            q=q_BNW.data_ptr(),
            pool=pool_PSY.data_ptr(),
            table=plan.page_table_BP.data_ptr(),
            lengths=plan.lengths_B.data_ptr(),
            starts=plan.starts_B1.data_ptr(),
            out=into.out_BNC.data_ptr(),
            pieces=into.pieces_JNC.data_ptr(),
            lse=into.lse_JN.data_ptr(),
            num_sequences=plan.num_sequences,
            table_stride=plan.page_table_BP.stride(0),
            num_heads=q_BNW.shape[1],
            starts_early=early,
            scale_log2=scale * math.log2(math.e),
        )


class Results:
    """What a kernel fills: sequences inside one part, and pieces of the others."""

    def __init__(self, q_BNW: Tensor, *, latent_width: int, parts: int, out_dtype: torch.dtype = torch.float32) -> None:
        num_sequences, num_heads, _ = q_BNW.shape
        pieces = parts + num_sequences
        self.out_BNC = q_BNW.new_empty(num_sequences, num_heads, latent_width, dtype=out_dtype)
        self.pieces_JNC = q_BNW.new_empty(pieces, num_heads, latent_width, dtype=torch.float32)
        self.lse_JN = q_BNW.new_empty(pieces, num_heads, dtype=torch.float32)  # base 2


def decode(q_BNW: Tensor, pool_PSY: Tensor, plan: PagedPlan, *, scale: float, latent_width: int) -> Tensor:
    """Contract of `mla_decode.mla_decode`; sequences of length 0 give 0."""
    assert len(q_BNW) == plan.num_sequences, "one query per sequence of the plan"
    assert pool_PSY.is_contiguous(), "a layer of the pool is contiguous"
    head_blocks = -(-q_BNW.shape[1] // HEADS)
    parts = max(1, num_processors(q_BNW.device) // head_blocks)
    dtype, q_BNW = q_BNW.dtype, q_BNW.to(torch.bfloat16).contiguous()
    assert (q_BNW.data_ptr() | pool_PSY.data_ptr()) % 16 == 0, "both are read 16 bytes at a time"
    into = Results(q_BNW, latent_width=latent_width, parts=parts)
    early = triton_join.joins_early(into.out_BNC)
    _compiled(q_BNW.device, plan.page_tokens).launch(
        (head_blocks, parts),
        THREADS,
        Arguments.of(q_BNW, pool_PSY, plan, into, scale=scale, early=early),
        starts_early=early,
    )
    triton_join.join(into.out_BNC, into.pieces_JNC, into.lse_JN, plan, parts=parts, early=early)
    return into.out_BNC.to(dtype)


def compile_refuses(device: torch.device, page_tokens: int) -> str | None:
    """Contract of `nvrtc.build_refuses`."""
    return nvrtc.build_refuses("decode kernel over 8-bit rows", lambda: _compiled(device, page_tokens))


@functools.cache
def _compiled(device: torch.device, page_tokens: int) -> nvrtc.Kernel:
    defines = {"PAGE": page_tokens, "STAGES": STAGES}
    return nvrtc.compile_kernel(SOURCE, "decode", defines, device=device, shared_bytes=SHARED_BYTES)
