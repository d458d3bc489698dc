"""`kvrelay bench relay`: writes of latents from one process into another's pool, over a plain copy of as many bytes.

Two processes, each with a pool on its own device or both on one. The ways:
contiguous: one run of pages on both sides, one descriptor.
scattered: pages of 64 tokens scattered on both sides, one descriptor each; as without packing.
packed: pages scattered at the writer, in a run at the reader: parts of 64 MiB through the packer of the product, which
gathers one part while those before it are on their way.
packed_small: the same in parts of 8,192 tokens, as the prefix cache's rows leave.
direct, direct_small: pages scattered on both sides, in parts like these two, by a kernel that writes into the reader's
mapped pool; only where this can be done.
unpacked: pages scattered on both sides: parts packed into a run of the reader, which copies each part to its pages as
it lands; the last copy is inside the time. The product has no such staging; see docs/handoff.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from kvrelay.bench import report
from kvrelay.bench.device_rates import short_name, synchronize, timed_s
from kvrelay.bench.relay_side import LAYOUT, STAGING_BYTES, TIMEOUT_S, Side, serve
from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kernels.pieces import WORD_BYTES
from kvrelay.kv_transfer.device_pool import gather_on_device
from kvrelay.kv_transfer.outgoing import Outgoing, Posting
from kvrelay.kv_transfer.packing import Gather, Packer
from kvrelay.kv_transfer.plan import Copies, Copy, CopyTable, table_of
from kvrelay.kv_transfer.transport import Done, Failed, Transport
from kvrelay.kvcache.pool import LatentPool

_ROUNDS = 7
_PART_BYTES = 64 << 20
_SMALL_PART_PAGES = 128


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    writer, reader = (torch.device(name) for name in (options.writer, options.reader))
    result = measure(writer, reader, megabytes=options.megabytes)
    report.tell(result, out=options.out, device=short_name(writer), bench="relay")
    return 0


def measure(writer: torch.device, reader: torch.device, *, megabytes: int) -> dict[str, Any]:
    """Return what each way makes of so many MiB, in GB/s and over a plain copy.

    Raises:
        TransferError: a way failed, took too long, or left other rows with the reader.
    """
    pages = max(1, (megabytes << 20) // LAYOUT.page_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, str(reader), pages), daemon=True)
    process.start()
    theirs.close()  # so that a reader that dies ends our wait
    try:
        side = Side.make("bench-writer", writer, pages)
        side.pool.layer(0).normal_()
        peer = side.direct.connect(ours.recv())
        figures = _ways(side, peer, ours, reader)
    finally:
        ours.send(None)
        process.join(TIMEOUT_S)
    num_bytes = pages * LAYOUT.page_bytes
    copied = num_bytes / figures.pop("copy")
    return {
        "writer": str(writer), "reader": str(reader), "bytes": num_bytes, "pages": pages,
        "copy_gb_per_s": round(copied / 1e9, 1),
        **{f"{name}_gb_per_s": round(num_bytes / taken / 1e9, 2) for name, taken in figures.items()},
        **{f"{name}_over_copy": round(num_bytes / taken / copied, 4) for name, taken in figures.items()},
    }  # fmt: skip


def _ways(side: Side, peer: str, reader: Connection, reader_device: torch.device) -> dict[str, float]:
    """Return the median time of each way, and of a plain copy; who is measured when alternates by round."""
    pages = side.pool.num_pages // 2
    page_bytes = LAYOUT.page_bytes
    target = torch.empty_like(side.packed_rows(), device=reader_device)
    from_pages, to_pages = side.scattered(1), side.scattered(2)
    whole = [Copy(0, 0, pages * page_bytes)]
    each = [Copy(a * page_bytes, b * page_bytes, page_bytes) for a, b in zip(from_pages, to_pages, strict=True)]
    gather = gather_on_device(side.pool) if side.pool.device.type == "cuda" else _host_gather(side.pool)
    packer = Packer(gather, offset_bytes=side.pool.num_bytes, num_bytes=STAGING_BYTES)
    in_a_run = table_of([Copy(a * page_bytes, (pages + b) * page_bytes, page_bytes) for b, a in enumerate(from_pages)])
    part_pages = max(1, _PART_BYTES // page_bytes)

    packed, direct = (
        [_parts(way, size) for size in (part_pages, _SMALL_PART_PAGES)] for way in (in_a_run, table_of(each))
    )

    def copy() -> None:
        target.copy_(side.packed_rows())
        synchronize(reader_device)

    def unpacked() -> None:
        tag = secrets.token_bytes(8)  # notices of earlier ways may still be on their way
        reader.send((part_pages, tag))
        reader.recv()
        _relay(side, peer, _parts(in_a_run, part_pages, tag=tag), packer)
        reader.recv()

    ways: dict[str, Callable[[], None]] = {
        "copy": copy,
        "contiguous": lambda: _write(side, peer, whole),
        "scattered": lambda: _write(side, peer, each),
        "packed": lambda: _relay(side, peer, packed[0], packer),
        "packed_small": lambda: _relay(side, peer, packed[1], packer),
        "unpacked": unpacked,
    }
    if side.direct.scatters(peer):
        ways |= {
            "direct": lambda: _relay(side, peer, direct[0], None),
            "direct_small": lambda: _relay(side, peer, direct[1], None),
        }
    taken = _in_turns(ways, side.pool.device)
    for name in ("unpacked", "direct", "direct_small"):
        if name in ways:
            side.pool.layer(0)[:pages].neg_()  # the reader has nothing of this yet
            synchronize(side.pool.device)
            ways[name]()
            _check(side, reader, side.slots(from_pages))
    return taken


def _in_turns(ways: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, float]:
    """Return the median time of each way; the first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(_ROUNDS + 1):
        for name, way in ways.items():
            seconds = timed_s(way, device)
            if round_number:
                taken[name].append(seconds)
    return {name: statistics.median(times) for name, times in taken.items()}


def _check(side: Side, reader: Connection, slots: Tensor) -> None:
    """Compare the rows that the reader unpacked, or was written, with ours by their sums.

    Raises:
        TransferError: they differ.
    """
    reader.send("check")
    expected = side.pool.rows(0).index_select(0, slots).float().sum(dtype=torch.float64).item()
    found = reader.recv()
    if abs(found - expected) > 1e-6 * abs(expected):
        raise TransferError(f"the reader holds other rows: sums {found} and {expected}")


def _write(side: Side, peer: str, copies: Sequence[Copy]) -> None:
    """Write and wait until it is done.

    Raises:
        TransferError: it failed, or took too long.
    """
    handle = side.transport.post(peer, copies, b"bench")
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        progress = side.transport.poll(handle)
        if isinstance(progress, Done):
            side.transport.release(handle)
            return
        if isinstance(progress, Failed) or time.monotonic() > until_s:
            raise TransferError(f"a write of {len(copies)} pieces: {progress}")


def _parts(copies: CopyTable, part_pages: int, *, tag: bytes = b"") -> list[Posting]:
    """Return a relay in parts of so many pages, each announced by `tag` and its number."""
    starts = range(0, len(copies), part_pages)
    return [
        Posting(Copies(copies[start : start + part_pages]), tag + number.to_bytes(4, "little"))
        for number, start in enumerate(starts)
    ]


def _relay(side: Side, peer: str, parts: Sequence[Posting], packer: Packer | None) -> None:
    """Write parts as the transfer thread of a writer does, to which other threads hand them, and wait for all.

    Without a packer they go directly.

    Raises:
        TransferError: one failed, or it took too long.
    """
    outgoing = Outgoing(peer, 0, 0, lambda _: None, packer=packer)
    for part in parts:
        outgoing.add(part)
    counters, until_s = Counters(), time.monotonic() + TIMEOUT_S
    transport: Transport = side.direct if packer is None else side.transport
    while outgoing.busy:
        outgoing.step(transport, counters)
        if outgoing.failure is not None or time.monotonic() > until_s:
            raise TransferError(f"{len(parts)} parts: {outgoing.failure or 'too slow'}")


def _host_gather(pool: LatentPool) -> Gather:
    words = pool.words()

    def gather(copies: CopyTable, offset_bytes: int) -> Callable[[], bool]:
        for copy in Copies(copies):
            first, number = copy.src_offset_bytes // WORD_BYTES, copy.num_bytes // WORD_BYTES
            words[offset_bytes // WORD_BYTES :][:number] = words[first : first + number]
            offset_bytes += copy.num_bytes
        return lambda: True

    return gather
