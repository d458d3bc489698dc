"""`kvrelay bench relay`: writes of latents from one process into another's pool, over a plain copy of as many bytes.

Two processes, each with a pool on its own device or both on one. Three ways: one contiguous run of pages; pages of 64
tokens scattered on both sides, one descriptor each; and the same pages packed into a contiguous run, written at once,
and unpacked by the reader, both steps included in the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrelay.bench import report
from kvrelay.bench.device_rates import short_name, synchronize, timed_s
from kvrelay.bench.random_model import V2_LITE
from kvrelay.core.errors import TransferError
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.fence_cells import HostCells, TensorCells
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import Cells, Done, Failed, Region
from kvrelay.kvcache.pool import LatentPool

_ROUNDS = 7
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Side:
    """One process's pool and agent. Half of the pages hold rows; the other half is where packed pages lie."""

    pool: LatentPool
    transport: NixlTransport

    @classmethod
    def make(cls, name: str, device: torch.device, pages: int) -> Side:
        dtype = "bfloat16"
        layout = PageLayout(
            num_layers=1, latent_width=V2_LITE.kv_lora_rank, rope_width=V2_LITE.rope_width, dtype=dtype, model_id="-"
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        pool = LatentPool(layout, 2 * pages, device)
        cells: Cells = HostCells(8)
        if device.type == "cuda":
            cells = TensorCells(torch.zeros(8, dtype=torch.int64, device=device))
        region = Region(pool.address, pool.num_bytes, device.index if device.type == "cuda" else -1)
        transport = NixlTransport(agent_name=name, pool=region, pool_pages=2 * pages, cells=cells, counters=Counters())
        return cls(pool, transport)

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


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    writer, reader = (torch.device(name) for name in (options.writer, options.reader))
    result = measure(writer, reader, megabytes=options.megabytes)
    print(json.dumps(result, indent=1))
    if options.out:
        name = short_name(writer)
        print(report.write(Path(options.out), device=name, bench="relay", result=result))
    return 0


def measure(writer: torch.device, reader: torch.device, *, megabytes: int) -> dict[str, Any]:
    layout = PageLayout(num_layers=1, latent_width=512, rope_width=64, dtype="bfloat16", model_id="-")
    pages = max(1, (megabytes << 20) // layout.page_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs, str(reader), pages), daemon=True)
    process.start()
    theirs.close()  # so that a reader that dies ends our wait
    try:
        side = Side.make("bench-writer", writer, pages)
        side.pool.layer(0).normal_()
        peer = side.transport.connect(ours.recv())
        figures = _ways(side, peer, ours, reader, layout)
    finally:
        ours.send(None)
        process.join(_TIMEOUT_S)
    num_bytes = pages * layout.page_bytes
    copied = num_bytes / figures.pop("copy")
    return {
        "writer": str(writer), "reader": str(reader), "bytes": num_bytes, "pages": pages,
        "copy_gb_per_s": round(copied / 1e9, 1),
        **{f"{name}_gb_per_s": round(num_bytes / taken / 1e9, 2) for name, taken in figures.items()},
        **{f"{name}_over_copy": round(num_bytes / taken / copied, 4) for name, taken in figures.items()},
    }  # fmt: skip


def _ways(
    side: Side, peer: str, reader: Connection, reader_device: torch.device, layout: PageLayout
) -> dict[str, float]:
    """Return the median time of each way, and of a plain copy; who is measured when alternates by round."""
    pages = side.pool.num_pages // 2
    page_bytes = layout.page_bytes
    target = torch.empty_like(side.packed_rows(), device=reader_device)
    from_pages, to_pages = side.scattered(1), side.scattered(2)
    slots = side.slots(from_pages)
    whole = [Copy(0, 0, pages * page_bytes)]
    each = [Copy(a * page_bytes, b * page_bytes, page_bytes) for a, b in zip(from_pages, to_pages, strict=True)]
    packed = [Copy(pages * page_bytes, pages * page_bytes, pages * page_bytes)]

    def copy() -> None:
        target.copy_(side.packed_rows())
        synchronize(reader_device)

    def pack_and_write() -> None:
        torch.index_select(side.token_rows(), 0, slots, out=side.packed_rows())
        synchronize(side.pool.device)  # a source is final before it is posted
        _write(side, peer, packed)
        reader.send("unpack")
        reader.recv()

    ways: dict[str, Callable[[], None]] = {
        "copy": copy,
        "contiguous": lambda: _write(side, peer, whole),
        "scattered": lambda: _write(side, peer, each),
        "packed": pack_and_write,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(_ROUNDS + 1):
        for name, way in ways.items():
            seconds = timed_s(way, side.pool.device)
            if round_number:
                taken[name].append(seconds)
    reader.send("check")
    expected = side.pool.rows(0).index_select(0, slots).float().sum(dtype=torch.float64).item()
    found = reader.recv()
    if abs(found - expected) > 1e-6 * abs(expected):
        raise TransferError(f"the reader holds other rows: sums {found} and {expected}")
    return {name: statistics.median(times) for name, times in taken.items()}


def _write(side: Side, peer: str, copies: Sequence[Copy]) -> None:
    """Write and wait until it is done.

    Raises:
        TransferError: it failed, or took too long.
    """
    handle = side.transport.post(peer, copies, b"bench")
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        progress = side.transport.poll(handle)
        if isinstance(progress, Done):
            side.transport.release(handle)
            return
        if isinstance(progress, Failed) or time.monotonic() > until_s:
            raise TransferError(f"a write of {len(copies)} pieces: {progress}")


def _read(writer: Connection, device: str, pages: int) -> None:
    """The other process: takes notices, unpacks when told to, until it is told nothing more."""
    side = Side.make("bench-reader", torch.device(device), pages)
    slots = side.slots(side.scattered(2))
    writer.send(side.transport.address())
    while True:
        side.transport.notices()
        if not writer.poll(0):
            continue
        order = writer.recv()
        if order is None:
            return
        if order == "unpack":
            side.token_rows().index_copy_(0, slots, side.packed_rows())
            synchronize(side.pool.device)
            writer.send(True)
        else:
            writer.send(side.pool.read(0, slots).float().sum(dtype=torch.float64).item())
