"""Attention of a block of queries over a block of keys, with its normaliser, so that blocks can be merged.

Shapes in this file: T query tokens, S keys, N heads, K = nope + R query/key width, V value width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.kernels import gpu_prefill
from kvrelay.kernels.dispatch import Backend, choose
from kvrelay.kernels.merge import merge_partials

# A block of scores [N, 256, 2048] stays near the cache and bounds memory whatever the prompt length.
QUERY_BLOCK_TOKENS = 256
KEY_BLOCK_TOKENS = 2048


class AttendBlock(Protocol):
    def __call__(
        self, q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Problem:
    device: str  # torch device type
    dtype: torch.dtype
    key_width: int  # K
    value_width: int  # V


def attend_block(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return (out_TNV, lse_TN) of softmax(scale q k) v over these keys alone.

    Args:
        q_TNK: at least one query, any float dtype; k_SNK and v_SNV alike, at least one key.
        causal: T == S, and query i sees keys 0..i.

    Returns:
        out_TNV, normalised over these keys: fp32, or the queries' half precision where a GPU's kernel rounds to it;
        lse_TN fp32 natural-log normaliser. Accumulates in fp32; memory grows with T + S, never with T * S.
    """
    assert not causal or q_TNK.shape[0] == k_SNK.shape[0], "causal needs as many queries as keys"
    kernel = kernel_for(Problem(q_TNK.device.type, q_TNK.dtype, q_TNK.shape[-1], v_SNV.shape[-1]))
    return kernel(q_TNK, k_SNK, v_SNV, scale=scale, causal=causal)


@functools.cache
def slows_when_long(problem: Problem) -> bool:
    """Say whether a call is slower than several over its parts: cuDNN's rate falls from 612 TFLOP/s at 32K tokens to
    549 at 512K."""
    return gpu_prefill.flash4_refuses(problem) is not None


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where the requests of a batch lie in joined queries and keys; made once per step."""

    queries: tuple[int, ...]  # tokens per request, each at least 1
    keys: tuple[int, ...]  # likewise
    query_starts: Tensor  # int32 on the device, [requests + 1]
    key_starts: Tensor  # likewise

    @classmethod
    def make(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Ragged:
        assert len(queries) == len(keys) > 0 < min(*queries, *keys), "every request has queries and keys"
        starts = [torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (queries, keys)]
        return cls(tuple(queries), tuple(keys), *(start.to(device, non_blocking=True) for start in starts))


def attend_ragged(
    q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, ragged: Ragged, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return `attend_block` of each request of a batch over its own keys, joined like the queries; without padding.

    Args:
        ragged: of the batch; with `causal` every request has as many queries as keys.
    """
    assert not causal or ragged.queries == ragged.keys, "causal needs as many queries as keys"
    problem = Problem(q_TNK.device.type, q_TNK.dtype, q_TNK.shape[-1], v_SNV.shape[-1])
    if len(ragged.queries) > 1 and gpu_prefill.flash4_refuses(problem) is None:
        return _flash4_ragged()(q_TNK, k_SNK, v_SNV, ragged, scale=scale, causal=causal)
    parts = zip(
        torch.split(q_TNK, list(ragged.queries)),
        torch.split(k_SNK, list(ragged.keys)),
        torch.split(v_SNV, list(ragged.keys)),
        strict=True,
    )
    attended = [attend_block(q, k, v, scale=scale, causal=causal) for q, k, v in parts]
    return torch.cat([out for out, _ in attended]), torch.cat([lse for _, lse in attended])


@functools.cache
def _flash4_ragged() -> Callable[..., tuple[Tensor, Tensor]]:
    return gpu_prefill.load_flash4_ragged()


@functools.cache
def kernel_for(problem: Problem, wanted: str = "auto") -> AttendBlock:
    """Return the chosen backend's function; the choice is made and logged once per problem."""
    return choose("mla_prefill", BACKENDS, problem, wanted).load()


def _cpu_flash(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Torch's fused CPU kernel. Half precisions are widened first: it would round its output to them, and merging
    rounded partials costs accuracy, while CPUs without bf16 units gain no speed from it."""
    key_width, value_width = q_TNK.shape[-1], v_SNV.shape[-1]
    width = max(key_width, value_width)  # the kernel wants one width; zeros change neither scores nor values
    q, k, v = (F.pad(x.float(), (0, width - x.shape[-1])).transpose(0, 1)[None] for x in (q_TNK, k_SNK, v_SNV))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  the only one that gives the normaliser
    out_1NTV, lse_1NT = flash(q, k, v, 0.0, causal, scale=scale)
    return out_1NTV[0].transpose(0, 1)[..., :value_width], lse_1NT[0].transpose(0, 1)


def _blocked(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Plain matmuls over blocks; runs anywhere."""
    outs, lses = [], []
    for start in range(0, q_TNK.shape[0], QUERY_BLOCK_TOKENS):
        q = q_TNK[start : start + QUERY_BLOCK_TOKENS]
        last_key = start + q.shape[0] if causal else k_SNK.shape[0]
        out, lse = None, None
        for key in range(0, last_key, KEY_BLOCK_TOKENS):
            keys = slice(key, min(key + KEY_BLOCK_TOKENS, last_key))
            part = _one_block(q, k_SNK[keys], v_SNV[keys], scale, start - key if causal else None)
            out, lse = part if out is None or lse is None else merge_partials(out, lse, *part)
        assert out is not None, "a block has at least one key"
        assert lse is not None, "a block has at least one key"
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _one_block(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, scale: float, lead: int | None) -> tuple[Tensor, Tensor]:
    """Attend one block; query i sees keys up to i + lead, or all when lead is None."""
    scores_NTS = torch.einsum("tnk,snk->nts", q_TNK.float() * scale, k_SNK.float())
    if lead is not None and lead < scores_NTS.shape[2]:
        hidden_TS = torch.ones(scores_NTS.shape[1:], dtype=torch.bool, device=scores_NTS.device).triu(lead + 1)
        scores_NTS.masked_fill_(hidden_TS, -torch.inf)
    lse_NT = scores_NTS.logsumexp(-1)
    weights_NTS = scores_NTS.sub_(lse_NT.nan_to_num(neginf=0.0)[..., None]).exp_()
    return torch.einsum("nts,snv->tnv", weights_NTS, v_SNV.float()), lse_NT.transpose(0, 1)


def _cpu_flash_refuses(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else f"runs on cpu, not {problem.device}"


BACKENDS: tuple[Backend[Problem, AttendBlock], ...] = (  # best first; the last never refuses
    # One core of an AMD EPYC, 16 heads, 192/128 wide, fp32, 512 queries over 4,096 keys: 376 ms against 514;
    # 8 heads, 96/64 wide: 98 against 186; causal 2,048: 107 against 164.
    Backend("cpu-flash", _cpu_flash_refuses, lambda: _cpu_flash),
    Backend("flash-attn-4", gpu_prefill.flash4_refuses, gpu_prefill.load_flash4),
    Backend("cudnn", gpu_prefill.cudnn_refuses, lambda: gpu_prefill.cudnn),
    Backend("torch", lambda _: None, lambda: _blocked),
)
