"""How a rank joins what it attended: rounded once where two results meet, in fp32 where more do."""

from __future__ import annotations

import pytest
import torch

from kvrelay.core.shard import Span
from kvrelay.kernels.mla_prefill import attend_block
from kvrelay.prefill_node import ring
from kvrelay.prefill_node.ring import Partial
from kvrelay.prefill_node.ring_plan import Pair


@pytest.fixture(autouse=True)
def a_kernel_that_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where the kernel's result has the precision of the queries."""

    def attend(q_TNK: torch.Tensor, *rest: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, ...]:
        out_TNV, lse_TN = attend_block(q_TNK, *rest, scale=scale, causal=causal)
        return out_TNV.to(q_TNK.dtype), lse_TN

    monkeypatch.setattr(ring, "attend_block", attend)


def attended(blocks: int, *, in_fp32: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(blocks)
    q_TNK = torch.randn(8, 2, 16, generator=generator).bfloat16()
    keys = torch.randn(blocks * 32, 2, 16, generator=generator).bfloat16()
    partial = Partial(q_TNK, in_fp32=in_fp32)
    for first in range(0, blocks * 32, 32):
        partial.add(Pair(Span(0, 8), Span(first, first + 32), causal=False), keys, keys, 0.25)
    exact = torch.softmax(torch.einsum("tnk,snk->nts", q_TNK.double(), keys.double()) * 0.25, -1)
    expected = torch.einsum("nts,snk->tnk", exact, keys.double())
    torch.testing.assert_close(partial.out_TNV.double(), expected, atol=2e-2, rtol=0)
    return partial.out_TNV


@pytest.mark.parametrize(("blocks", "in_fp32", "dtype"), [
    (1, True, torch.bfloat16), (2, False, torch.bfloat16), (2, True, torch.float32), (5, True, torch.float32),
])  # fmt: skip
def test_results_are_joined_in_the_precision_that_was_asked_for(blocks: int, in_fp32: bool, dtype: torch.dtype) -> None:
    assert attended(blocks, in_fp32=in_fp32).dtype == dtype
