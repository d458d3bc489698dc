"""What another engine took for the same shape on the same kind of device, recorded once, and our ratios to it.

vLLM 0.26.0, DeepSeek-V2-Lite's shape, bf16, one NVIDIA H200, chunks of 32,768 tokens. Its dummy weights send every
token to the same experts, so only figures of ours with the same routing are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TTFT_MS: Mapping[int, float] = {8192: 101.0, 32_768: 545.0, 131_072: 4693.0}  # by prompt tokens
STEP_MS: Mapping[tuple[int, int], float] = {  # by (batch, context)
    (1, 8192): 3.65,
    (1, 32_768): 4.18,
    (1, 131_072): 6.36,
    (32, 8192): 6.51,
    (32, 32_768): 12.02,
}


def ttft_ratio(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return {"over_vllm": ratio}, or nothing where there is no like figure."""
    theirs = TTFT_MS.get(figures["prompt_tokens"]) if figures["same_experts"] else None
    return {} if theirs is None else {"over_vllm": round(figures["ttft_ms"] / theirs, 3)}


def step_ratio(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return {"over_vllm": ratio}, or nothing where there is no like figure."""
    theirs = STEP_MS.get((figures["batch"], figures["context"])) if figures["same_experts"] else None
    return {} if theirs is None else {"over_vllm": round(figures["step_ms"] / theirs, 3)}
