"""Whether the CUDA C++ decode kernels can run here: one over 8-bit rows, one for many heads."""

from __future__ import annotations

import torch

from kvrelay.kernels.nvrtc import nvrtc_refuses
from kvrelay.kernels.triton_support import triton_refuses

# Up to so many heads Triton is faster than a kernel that computes 64 for them.
TRITON_HEADS = 16


def cuda_decode_refuses(
    device: str, dtype: torch.dtype, latent_width: int, row_width: int, page_tokens: int
) -> str | None:
    """Return None, or the reason for the one over 8-bit rows; what nothing else speaks against is compiled."""
    if (why := input_refuses(device, latent_width, row_width)) is not None:
        return why
    if dtype != torch.uint8:
        return f"takes rows of 8 bits, not {dtype}"
    if page_tokens % 32:
        return f"takes pages of whole tiles of 32 rows, not of {page_tokens}"
    if (why := _compiler_refuses(device)) is not None:
        return why
    from kvrelay.kernels.cuda_decode import compile_refuses  # noqa: PLC0415 - it needs Triton

    return compile_refuses(torch.device("cuda", torch.cuda.current_device()), page_tokens)


def heads_decode_refuses(
    device: str, dtype: torch.dtype, num_heads: int, latent_width: int, row_width: int, page_tokens: int
) -> str | None:
    """Return None, or the reason for the one for many heads; what nothing else speaks against is compiled."""
    if (why := input_refuses(device, latent_width, row_width)) is not None:
        return why
    if dtype != torch.bfloat16:
        return f"takes bf16, not {dtype}"
    if page_tokens != 64:
        return f"takes pages of 64 rows, not {page_tokens}"
    if num_heads <= TRITON_HEADS:
        return f"works on 64 heads at a time, of which {num_heads} fill little: Triton is faster there"
    if (why := _compiler_refuses(device)) is not None:
        return why
    from kvrelay.kernels.heads_decode import compile_refuses  # noqa: PLC0415 - it needs Triton

    return compile_refuses(torch.device("cuda", torch.cuda.current_device()))


def input_refuses(device: str, latent_width: int, row_width: int) -> str | None:
    """Return None, or the reason of what is made for CUDA and for the rows of DeepSeek's models."""
    if device != "cuda":
        return f"runs on cuda, not {device}"
    if (latent_width, row_width) != (512, 576):
        return f"takes rows of 512 + 64, not {latent_width} + {row_width - latent_width}"
    return None


def _compiler_refuses(device: str) -> str | None:
    """Both kernels join pieces through Triton."""
    if (why := nvrtc_refuses() or triton_refuses(device)) is not None:
        return why
    if torch.cuda.get_device_capability()[0] != 9:
        return f"is written for Hopper, not compute capability {torch.cuda.get_device_capability()}"
    return None
