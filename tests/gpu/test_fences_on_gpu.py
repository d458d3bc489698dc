"""Fences in device memory wait for nothing that the device computes."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kv_transfer.fence_cells import FenceMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_numbers_of_fences_are_written_and_read_while_chunks_are_queued() -> None:
    device = torch.device("cuda", 0)
    fences = FenceMemory.in_tensor(torch.zeros(8, dtype=torch.int64, device=device), num_sources=8)
    fences.sources.give_back(fences.sources.take(1))
    assert fences.cells.load(3) == 0

    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # about a second
    computed.record()
    source = fences.sources.take(77)
    assert fences.cells.load(3) == 0
    assert not computed.query(), "a fence waited for the model"  # type: ignore[no-untyped-call]

    torch.cuda.synchronize()
    assert fences.sources._numbers.load(source) == 77
