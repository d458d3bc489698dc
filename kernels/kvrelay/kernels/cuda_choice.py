"""Whether the CUDA C++ decode kernels can run here: one over 8-bit rows, and two over bf16 rows.

Of those, one is for few heads and one for many. Batch and length do not matter: with 16 heads the one for few is faster
than Triton's and FlashMLA's, or as fast in large batches of long contexts. H200, times over its own, by batch x tokens:

               1x8K  1x128K  8x4K  8x32K  32x4K  32x32K  64x4K  64x16K  64x32K  64x128K
    Triton     1.12    1.08  1.17   1.10   1.24    1.01   1.11    1.03    1.00     1.03
    for many   1.18    1.06  1.04   1.02   1.08    1.03   1.05    1.03    1.02     1.02
    FlashMLA   2.61    1.67  1.36   1.07   1.13    1.02   1.08    1.04    1.05     0.995
"""

from __future__ import annotations

import torch

from kvrelay.kernels.nvrtc import nvrtc_refuses
from kvrelay.kernels.triton_support import triton_refuses

# So many make one block of the kernel for few heads, which reads all rows anew for each block. Beyond, the one for many
# is faster, though it computes 64 for any number.
FEW_HEADS = 16


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


def narrow_decode_refuses(
    device: str, dtype: torch.dtype, num_heads: int, latent_width: int, row_width: int, page_tokens: int
) -> str | None:
    """Return None, or the reason for the one for few heads; what nothing else speaks against is compiled."""
    if (why := _pages_refuse(device, dtype, latent_width, row_width, page_tokens)) is not None:
        return why
    if num_heads > FEW_HEADS:
        return f"reads rows anew for every {FEW_HEADS} heads, of which there are {num_heads}"
    from kvrelay.kernels.pages_decode import NARROW  # noqa: PLC0415 - it needs Triton

    return NARROW.compile_refuses(torch.device("cuda", torch.cuda.current_device()))


def heads_decode_refuses(
    device: str, dtype: torch.dtype, num_heads: int, latent_width: int, row_width: int, page_tokens: int
) -> str | None:
    """Return None, or the reason for the one for many heads; what nothing else speaks against is compiled."""
    if (why := _pages_refuse(device, dtype, latent_width, row_width, page_tokens)) is not None:
        return why
    if num_heads <= FEW_HEADS:
        return f"works on 64 heads at a time, of which {num_heads} fill little: another one is faster there"
    from kvrelay.kernels.pages_decode import HEADS  # noqa: PLC0415 - it needs Triton

    return HEADS.compile_refuses(torch.device("cuda", torch.cuda.current_device()))


def _pages_refuse(device: str, dtype: torch.dtype, latent_width: int, row_width: int, page_tokens: int) -> str | None:
    if (why := input_refuses(device, latent_width, row_width)) is not None:
        return why
    if dtype != torch.bfloat16:
        return f"takes bf16, not {dtype}"
    if page_tokens != 64:
        return f"takes pages of 64 rows, not {page_tokens}"
    return _compiler_refuses(device)


def input_refuses(device: str, latent_width: int, row_width: int) -> str | None:
    """Return None, or the reason of what is made for CUDA and for the rows of DeepSeek's models."""
    if device != "cuda":
        return f"runs on cuda, not {device}"
    if (latent_width, row_width) != (512, 576):
        return f"takes rows of 512 + 64, not {latent_width} + {row_width - latent_width}"
    return None


def _compiler_refuses(device: str) -> str | None:
    """All of them join pieces through Triton."""
    if (why := nvrtc_refuses() or triton_refuses(device)) is not None:
        return why
    if torch.cuda.get_device_capability()[0] != 9:
        return f"is written for Hopper, not compute capability {torch.cuda.get_device_capability()}"
    return None
