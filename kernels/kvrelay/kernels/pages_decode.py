"""Split decode attention over pages of bf16 latent rows, in CUDA C++: blocks of 16 heads, and of 64.

The line of tiles is cut into parts of whole pages, and pieces are numbered and joined, as in `triton_decode`.

Shapes in this file: B sequences, J pieces, P pages, S rows of a page, N heads, C latent, W = C + R.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.kernels import cuda_decode, nvrtc, triton_join
from kvrelay.kernels.cuda_decode import Results
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.triton_support import num_processors, starts_early

PART_TILES = 2  # what the tiles of a part are a multiple of: whole pages


class Arguments(ctypes.Structure):
    """`Args` of cuda/pages.cuh."""

    _fields_ = (
        ("rows", nvrtc.TensorMap),
        ("queries", nvrtc.TensorMap),
        ("others", cuda_decode.Arguments),
        ("padding", ctypes.c_ubyte * 40),  # to a multiple of 64 bytes
    )


@dataclass(frozen=True, slots=True)
class PagesKernel:
    """A source of cuda/, and how it is launched."""

    file: str
    heads: int  # of one block
    threads: int
    shared_bytes: int  # of a block
    pairs: bool = False  # of blocks of the same part share what they copy

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("cuda") / self.file

    def decode(self, q_BNW: Tensor, pool_PSW: Tensor, plan: PagedPlan, /, *, scale: float, latent_width: int) -> Tensor:
        """Contract of `mla_decode.mla_decode`; sequences of length 0 give 0."""
        num_sequences, num_heads, row_width = q_BNW.shape
        assert num_sequences == plan.num_sequences, "one query per sequence of the plan"
        assert pool_PSW.is_contiguous(), "a layer of the pool is contiguous"
        assert scale > 0, "the largest product is the largest score"
        head_blocks = -(-num_heads // self.heads)
        parts = max(1, num_processors(q_BNW.device) // head_blocks)
        dtype, q_BNW = q_BNW.dtype, q_BNW.to(torch.bfloat16).contiguous()
        assert (q_BNW.data_ptr() | pool_PSW.data_ptr()) % 16 == 0, "both are read 16 bytes at a time"
        into = Results(q_BNW, latent_width=latent_width, parts=parts, out_dtype=torch.bfloat16)
        early = starts_early(q_BNW.device)  # in batches too: a block fills a processor, so that nothing waits beside it
        arguments = Arguments(
            rows=nvrtc.tensor_map(pool_PSW.data_ptr(), pool_PSW.shape[0] * pool_PSW.shape[1], row_width),
            queries=nvrtc.tensor_map(q_BNW.data_ptr(), num_sequences * num_heads, row_width),
            others=cuda_decode.Arguments.of(q_BNW, pool_PSW, plan, into, scale=scale, early=early),
        )
        cluster = 2 if self.pairs and head_blocks % 2 == 0 else 1
        _compiled(self, q_BNW.device, cluster).launch((head_blocks, parts), self.threads, arguments, starts_early=early)
        triton_join.join(into.out_BNC, into.pieces_JNC, into.lse_JN, plan, parts=parts, early=early, tiles=PART_TILES)
        return into.out_BNC.to(dtype)

    def compile_refuses(self, device: torch.device) -> str | None:
        """Contract of `nvrtc.build_refuses`."""
        clusters = (1, 2) if self.pairs else (1,)
        return nvrtc.build_refuses(
            f"decode kernel for {self.heads} heads a block",
            lambda: [_compiled(self, device, size) for size in clusters],
        )


@functools.cache
def _compiled(kernel: PagesKernel, device: torch.device, cluster: int) -> nvrtc.Kernel:
    defines = {"CLUSTER": cluster}
    return nvrtc.compile_kernel(kernel.source, "decode", defines, device=device, shared_bytes=kernel.shared_bytes)


NARROW = PagesKernel("narrow.cu", heads=16, threads=192, shared_bytes=219_792)
HEADS = PagesKernel("heads.cu", heads=64, threads=384, shared_bytes=222_816, pairs=True)
