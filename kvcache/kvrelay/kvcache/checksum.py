"""Checksums of latent rows: xxh3-64, at memory speed.

Both sides of a hand-off hash the rows of a part in token order, whatever pages they lie in, so the sums are equal
exactly when the bytes are. xxhash releases the GIL while it reads a large piece, so a transfer thread can verify while
the step thread computes.

Shapes in this file: T tokens, W = C + R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash

if TYPE_CHECKING:
    from kvrelay.kvcache.pool import LatentPool


def checksum_ranges(memory: memoryview, ranges: Sequence[tuple[int, int]]) -> int:
    """Return the xxh3-64 of the pieces (offset_bytes, num_bytes) of `memory`, in the order given.

    How the bytes are cut does not matter: two adjacent ranges hash like the one that covers both.
    """
    digest = xxhash.xxh3_64()
    for offset_bytes, num_bytes in ranges:
        assert offset_bytes + num_bytes <= len(memory), "a range ends behind the pool"
        digest.update(memory[offset_bytes : offset_bytes + num_bytes])
    return digest.intdigest()


def pool_checksum(pool: LatentPool) -> Callable[[Sequence[tuple[int, int]]], int]:
    """Return the checksum over a pool's own bytes, as `checksum_ranges`; any thread may call it.

    In device memory each range must lie in one layer; the copy to the host waits for the kernels that produce it.
    """
    if pool.device.type == "cpu":
        memory = pool.memory()
        return lambda ranges: checksum_ranges(memory, ranges)
    start = start_pool_checksum(pool)
    stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]  # neither waits for the model's kernels nor makes them wait

    def on_device(ranges: Sequence[tuple[int, int]]) -> int:
        with torch.cuda.stream(stream):
            return start(ranges)()

    return on_device


def start_pool_checksum(pool: LatentPool) -> Callable[[Sequence[tuple[int, int]]], Callable[[], int]]:
    """Return `pool_checksum` over device memory in two steps: a copy to the host behind what is on the calling thread's
    stream, and a call that waits for it and sums. Each range must lie in one layer."""
    slab_bytes = pool.num_pages * pool.layout.page_bytes

    def start(ranges: Sequence[tuple[int, int]]) -> Callable[[], int]:
        host = torch.empty(sum(num_bytes for _, num_bytes in ranges), dtype=torch.uint8, pin_memory=True)
        place = 0
        for offset_bytes, num_bytes in ranges:
            layer, first = divmod(offset_bytes, slab_bytes)
            piece = pool.rows(layer).view(torch.uint8).view(-1)[first : first + num_bytes]
            host[place : place + num_bytes].copy_(piece, non_blocking=True)
            place += num_bytes
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def finish() -> int:
            copied.synchronize()
            return xxhash.xxh3_64_intdigest(host.numpy().data)

        return finish

    return start
