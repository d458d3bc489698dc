"""Scattered rows of a GPU leave packed, and both sides sum them on the device."""

from __future__ import annotations

import time

import pytest
import torch

from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters
from kvrelay.kernels import checksum
from kvrelay.kv_transfer import pool_agent
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.outgoing import Outgoing, Posting
from kvrelay.kv_transfer.plan import Route, part_ranges
from kvrelay.kv_transfer.transport import Region
from kvrelay.kv_transfer.values import ChecksumKind
from kvrelay.kvcache.pool import LatentPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LAYOUT = PageLayout(num_layers=3, latent_width=512, rope_width=64, dtype="bfloat16", model_id="m")
PAGES = 200
TOKENS = Span(0, 64 * 60 - 10)
SOURCES = torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist()[:60]
TARGETS = list(range(130, 190))


@pytest.fixture
def pool() -> LatentPool:
    made = LatentPool(LAYOUT, PAGES, torch.device("cuda", 0), staging_bytes=16 << 20)
    for layer in range(3):
        made.layer(layer).normal_()
    return made


def test_both_kinds_of_checksums_of_a_device_are_those_of_a_host(pool: LatentPool) -> None:
    host = LatentPool(LAYOUT, PAGES, torch.device("cpu"))
    for layer in range(3):
        host.layer(layer).copy_(pool.layer(layer))
    on_device, on_host = pool_agent.local_pool(pool), pool_agent.local_pool(host)
    assert on_device.kind is ChecksumKind.WORDS

    for layer in range(3):
        for pages in (SOURCES, TARGETS):
            ranges = part_ranges(layout=LAYOUT, layer=layer, tokens=TOKENS, pages=pages, pool_pages=PAGES)
            for kind in ChecksumKind:
                expected = on_host.summing(kind).checksum(ranges)
                assert on_device.summing(kind).checksum(ranges) == expected
                sums = on_device.summing(kind).device_sums
                assert sums is not None
                assert sums.start(ranges)() == expected
    assert checksum.checksum_ranges(host.memory(), ranges) == expected


def test_scattered_pages_land_in_a_run_of_pages_by_one_piece_per_part(pool: LatentPool) -> None:
    fences = FenceMemory.in_tensor(torch.zeros(8, dtype=torch.int64, device=pool.device))
    transport = NixlTransport(
        agent_name="packs/gpu", pool=Region(pool.address, pool.region_bytes, 0), pool_pages=PAGES, fences=fences,
        counters=Counters(),
    )  # fmt: skip
    transport.connect(transport.address())
    route = Route.of(
        layout=LAYOUT, tokens=TOKENS, src_pages=SOURCES, src_pool_pages=PAGES, dst_pages=TARGETS, dst_pool_pages=PAGES
    )
    torch.cuda.synchronize()
    told: list[object] = []
    outgoing = Outgoing("packs/gpu", 0, 1, told.extend, packer=pool_agent.packer(pool))
    for layer in range(3):
        outgoing.add(Posting(route.copies(layer), b"part"))
    outgoing.finish()
    counters, until_s = Counters(), time.monotonic() + 30

    while (outgoing.busy or not told) and time.monotonic() < until_s:
        outgoing.step(transport, counters)
        transport.notices()

    assert [type(event).__name__ for event in told] == ["Drained"]
    assert counters.values["parts_packed_total"] == counters.values["pieces_posted_total"] == 3
    rows = TOKENS.num_tokens
    for layer in range(3):
        sent, landed = (pool.layer(layer)[pages].flatten(0, 1)[:rows] for pages in (SOURCES, TARGETS))
        assert torch.equal(sent, landed)
        assert not torch.equal(pool.layer(layer)[TARGETS[-1], -10:], pool.layer(layer)[SOURCES[-1], -10:])
    transport.disconnect("packs/gpu")
