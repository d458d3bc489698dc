"""One process of `kvrelay bench relay`: a pool and its agents, and what the reader's process does with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from kvrelay.bench.device_rates import synchronize
from kvrelay.bench.random_model import V2_LITE
from kvrelay.core.errors import TransferError
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.pool_agent import with_direct_writes
from kvrelay.kv_transfer.transport import Region, Transport
from kvrelay.kvcache.pool import LatentPool

TIMEOUT_S = 60.0
STAGING_BYTES = 256 << 20
LAYOUT = PageLayout(
    num_layers=1, latent_width=V2_LITE.kv_lora_rank, rope_width=V2_LITE.rope_width, dtype="bfloat16", model_id="-"
)


@dataclass(frozen=True, slots=True)
class Side:
    """One process's pool and agent. Half of the pages hold rows; the other half is where packed pages lie."""

    pool: LatentPool
    transport: NixlTransport
    direct: Transport  # around it; the same where nothing can be written directly

    @classmethod
    def make(cls, name: str, device: torch.device, pages: int) -> Side:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        pool = LatentPool(LAYOUT, 2 * pages, device, staging_bytes=STAGING_BYTES)
        fences = FenceMemory.on_host(8)
        if device.type == "cuda":
            fences = FenceMemory.in_tensor(torch.zeros(8, dtype=torch.int64, device=device))
        region = Region(pool.address, pool.region_bytes, device.index if device.type == "cuda" else -1)
        transport = NixlTransport(
            agent_name=name, pool=region, pool_pages=2 * pages, fences=fences, counters=Counters()
        )
        return cls(pool, transport, with_direct_writes(transport, pool, counters=Counters()))

    def scattered(self, seed: int) -> list[int]:
        """Return half of the pages in random order."""
        pages = self.pool.num_pages // 2
        return torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()

    def slots(self, pages: Sequence[int]) -> Tensor:
        rows = torch.tensor(pages)[:, None] * self.pool.layout.page_tokens + torch.arange(64)
        return rows.flatten().to(self.pool.device)

    def token_rows(self) -> Tensor:
        """Return a view of the first half of the pool."""
        rows = self.pool.rows(0)
        return rows[: rows.shape[0] // 2]

    def packed_rows(self) -> Tensor:
        """Return a view of the second half of the pool."""
        rows = self.pool.rows(0)
        return rows[rows.shape[0] // 2 :]


def serve(writer: Connection, device: str, pages: int) -> None:
    """Be the reader: take notices, unpack parts when told to, until told nothing more."""
    side = Side.make("bench-reader", torch.device(device), pages)
    scattered = side.scattered(2)
    slots = side.slots(scattered)
    writer.send(side.direct.address())
    tables: dict[int, list[Tensor]] = {}
    while True:
        side.transport.notices()
        if not writer.poll(0):
            continue
        order = writer.recv()
        if order is None:
            return
        if order == "check":
            writer.send(side.pool.read(0, slots).float().sum(dtype=torch.float64).item())
            continue
        part_pages, tag = order
        if part_pages not in tables:
            tables[part_pages] = [side.slots(scattered[at : at + part_pages]) for at in range(0, pages, part_pages)]
        writer.send(True)
        _unpack_as_they_land(side, tables[part_pages], tag)
        synchronize(side.pool.device)
        writer.send(True)


def _unpack_as_they_land(side: Side, slots_of_parts: Sequence[Tensor], tag: bytes) -> None:
    starts = [0]
    for slots in slots_of_parts:
        starts.append(starts[-1] + len(slots))
    waits_for = set(range(len(slots_of_parts)))
    until_s = time.monotonic() + TIMEOUT_S
    while waits_for and time.monotonic() < until_s:
        for _, notice in side.transport.notices():
            if not notice.startswith(tag):
                continue
            number = int.from_bytes(notice[len(tag) :], "little")
            rows = side.packed_rows()[starts[number] : starts[number + 1]]
            side.token_rows().index_copy_(0, slots_of_parts[number], rows)
            waits_for.remove(number)
    if waits_for:
        raise TransferError(f"{len(waits_for)} of {len(slots_of_parts)} parts did not land within {TIMEOUT_S:g} s")
