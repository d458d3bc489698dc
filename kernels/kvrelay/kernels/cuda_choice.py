"""Whether the CUDA C++ kernel over 8-bit rows can run here."""

from __future__ import annotations

import torch

from kvrelay.kernels.nvrtc import nvrtc_refuses
from kvrelay.kernels.triton_support import triton_refuses


def cuda_decode_refuses(
    device: str, dtype: torch.dtype, latent_width: int, row_width: int, page_tokens: int
) -> str | None:
    """Return None, or the reason; it joins pieces through Triton. What nothing else speaks against is compiled."""
    if device != "cuda":
        return f"runs on cuda, not {device}"
    if dtype != torch.uint8:
        return f"takes rows of 8 bits, not {dtype}"
    if (latent_width, row_width) != (512, 576):
        return f"takes rows of 512 + 64, not {latent_width} + {row_width - latent_width}"
    if page_tokens % 32:
        return f"takes pages of whole tiles of 32 rows, not of {page_tokens}"
    if (why := nvrtc_refuses() or triton_refuses(device)) is not None:
        return why
    if torch.cuda.get_device_capability()[0] != 9:
        return f"is written for Hopper, not compute capability {torch.cuda.get_device_capability()}"
    from kvrelay.kernels.cuda_decode import compile_refuses  # noqa: PLC0415 - it needs Triton

    return compile_refuses(torch.device("cuda", torch.cuda.current_device()), page_tokens)
