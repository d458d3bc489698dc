"""A node on a GPU relays a page to itself before it serves."""

from __future__ import annotations

import pytest
import torch

from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.self_relay import prove_relay
from kvrelay.kv_transfer.transport import Region
from kvrelay.kvcache.pool import LatentPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_page_of_a_gpu_is_relayed_to_its_own_node_and_leaves_nothing_behind() -> None:
    device = torch.device("cuda", 0)
    layout = PageLayout(num_layers=3, latent_width=512, rope_width=64, dtype="bfloat16", model_id="m")
    pool = LatentPool(layout, 8, device)
    fences = FenceMemory.in_tensor(torch.zeros(8, dtype=torch.int64, device=device))
    transport = NixlTransport(
        agent_name="self/gpu", pool=Region(pool.address, pool.num_bytes, 0), pool_pages=8, fences=fences,
        counters=Counters(),
    )  # fmt: skip
    prove_relay(transport, pool)
    assert not any(pool.layer(layer).any() for layer in range(3))
    transport.close()
