"""Split decode attention over bf16 latent rows, in CUDA C++ (cuda/heads.cu), for 64 heads a block.

The line of tiles is cut into parts of whole pages, and pieces are numbered and joined, as in `triton_decode`.

Shapes in this file: B sequences, J pieces, P pages, S rows of a page, N heads, C latent, W = C + R.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.kernels import cuda_decode, nvrtc, triton_join
from kvrelay.kernels.cuda_decode import Results
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.triton_support import num_processors

SOURCE = Path(__file__).with_name("cuda") / "heads.cu"
HEADS = 64  # of one block
THREADS = 384
PART_TILES = 2  # what the tiles of a part are a multiple of: whole pages
SHARED_BYTES = 222_288  # of a block: queries and two pages


class Arguments(ctypes.Structure):
    """`Args` of the source."""

    _fields_ = (
        ("rows", nvrtc.TensorMap),
        ("others", cuda_decode.Arguments),
        ("padding", ctypes.c_ubyte * 40),  # to a multiple of 64 bytes
    )


def decode(q_BNW: Tensor, pool_PSW: Tensor, plan: PagedPlan, *, scale: float, latent_width: int) -> Tensor:
    """Contract of `mla_decode.mla_decode`; sequences of length 0 give 0."""
    num_sequences, num_heads, row_width = q_BNW.shape
    assert num_sequences == plan.num_sequences, "one query per sequence of the plan"
    assert pool_PSW.is_contiguous(), "a layer of the pool is contiguous"
    assert scale > 0, "the largest product is the largest score"
    head_blocks = -(-num_heads // HEADS)
    parts = max(1, num_processors(q_BNW.device) // head_blocks)
    dtype, q_BNW = q_BNW.dtype, q_BNW.to(torch.bfloat16).contiguous()
    assert (q_BNW.data_ptr() | pool_PSW.data_ptr()) % 16 == 0, "both are read 16 bytes at a time"
    into = Results(q_BNW, latent_width=latent_width, parts=parts, out_dtype=torch.bfloat16)
    early = triton_join.joins_early(into.out_BNC)
    arguments = Arguments(
        rows=nvrtc.tensor_map(pool_PSW.data_ptr(), pool_PSW.shape[0] * pool_PSW.shape[1], row_width),
        others=cuda_decode.Arguments.of(q_BNW, pool_PSW, plan, into, scale=scale, early=early),
    )
    _compiled(q_BNW.device).launch((head_blocks, parts), THREADS, arguments, starts_early=early)
    triton_join.join(into.out_BNC, into.pieces_JNC, into.lse_JN, plan, parts=parts, tiles=PART_TILES)
    return into.out_BNC.to(dtype)


def compile_refuses(device: torch.device) -> str | None:
    """Contract of `nvrtc.build_refuses`."""
    return nvrtc.build_refuses("decode kernel for many heads", lambda: _compiled(device))


@functools.cache
def _compiled(device: torch.device) -> nvrtc.Kernel:
    return nvrtc.compile_kernel(SOURCE, "decode", {}, device=device, shared_bytes=SHARED_BYTES)
