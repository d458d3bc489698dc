"""Whether a step is small enough for the kernels of `few_tokens`."""

from __future__ import annotations

from kvrelay.kernels.triton_support import triton_refuses

# Up to here each token takes its own pass over the weights, which the cache makes cheap; beyond, matrix units win.
MAX_TOKENS = 4


def few_tokens_refuse(device: str, num_tokens: int) -> str | None:
    """Return None, or the reason why these kernels do not take such a step."""
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens, at most {MAX_TOKENS}"
    return triton_refuses(device)
