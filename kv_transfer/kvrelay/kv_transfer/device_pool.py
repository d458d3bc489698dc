"""Checksums and packing over a pool in device memory, each one launch and no wait for the device.

Any thread may use them: what is launched goes to the calling thread's stream, or to a stream of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels.checksum import to_unsigned
from kvrelay.kernels.cuda_write import ALIGN_BYTES, write_refuses
from kvrelay.kernels.pieces import WORD_BYTES, Pieces
from kvrelay.kernels.triton_support import num_processors
from kvrelay.kv_transfer.local import Checksum, StartChecksum
from kvrelay.kv_transfer.packing import Gather
from kvrelay.kv_transfer.piece_writer import PieceWriter
from kvrelay.kv_transfer.plan import CopyTable
from kvrelay.kvcache.pool import LatentPool

_MOST_TABLES = 64


def start_word_sum(pool: LatentPool) -> StartChecksum:
    """Return `checksum_ranges` of the kernels over a pool's own bytes in two steps: a launch behind what is on the
    calling thread's stream, and a call that waits for it. Each range must lie in one layer, all in the same one."""
    from kvrelay.kernels.triton_checksum import piece_sum  # noqa: PLC0415 - optional

    slab_bytes = pool.num_pages * pool.layout.page_bytes
    words, tables = pool.words(), _Tables(pool.device)

    def start(ranges: Sequence[tuple[int, int]]) -> Callable[[], int]:
        layer_bytes = ranges[0][0] // slab_bytes * slab_bytes
        pieces = tables.of(tuple((offset - layer_bytes, num_bytes) for offset, num_bytes in ranges))
        total = piece_sum(words[layer_bytes // WORD_BYTES :], pieces)
        return _later(total)

    return start


def word_sum(pool: LatentPool) -> Checksum:
    """Return the same in one step, on a stream of its own that goes before the model's: for rows that have landed."""
    start = start_word_sum(pool)
    stream = torch.cuda.Stream(pool.device, priority=-1)  # type: ignore[no-untyped-call]

    def on_device(ranges: Sequence[tuple[int, int]]) -> int:
        with torch.cuda.stream(stream):
            return start(ranges)()

    return on_device


def gather_on_device(pool: LatentPool) -> Gather:
    """Return what gathers rows into the pool's staging, on a stream of its own that goes before the model's."""
    if pool.layout.row_bytes % ALIGN_BYTES == 0 and write_refuses(pool.device) is None:
        return _gather_by_writes(pool)
    from kvrelay.kernels.triton_pack import pack_pieces  # noqa: PLC0415 - optional

    words = pool.words()
    stream = torch.cuda.Stream(pool.device, priority=-1)  # type: ignore[no-untyped-call]

    def gather(copies: CopyTable, offset_bytes: int) -> Callable[[], bool]:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            pieces = Pieces.of(copies[:, (0, 2)], pool.device)
            pack_pieces(words, pieces, words[offset_bytes // WORD_BYTES :])
            done.record()
        return done.query

    return gather


def _gather_by_writes(pool: LatentPool) -> Gather:
    writer, num_blocks = PieceWriter(pool.device), num_processors(pool.device)

    def gather(copies: CopyTable, offset_bytes: int) -> Callable[[], bool]:
        packed = copies.copy()
        packed[:, 1] = offset_bytes + np.cumsum(copies[:, 2]) - copies[:, 2]
        return writer.write(pool.address, pool.address, packed, num_blocks=num_blocks)

    return gather


class _Tables:
    """Tables of ranges that come again: a part has the same in every layer. Locked: a pool has several users."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[tuple[int, int], ...], tuple[Pieces, torch.cuda.Event]] = OrderedDict()

    def of(self, ranges: tuple[tuple[int, int], ...]) -> Pieces:
        with self._lock:
            known = self._tables.get(ranges)
            if known is None:
                pieces = Pieces.of(ranges, self._device)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
                known = self._tables[ranges] = pieces, copied
                if len(self._tables) > _MOST_TABLES:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(ranges)
        pieces, copied = known
        copied.wait()  # another thread's stream may have brought it
        pieces.table_G3.record_stream(torch.cuda.current_stream(self._device))
        return pieces


def _later(total: Tensor) -> Callable[[], int]:
    host = torch.empty(1, dtype=torch.int64, pin_memory=True)
    host.copy_(total, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def finish() -> int:
        copied.synchronize()
        return to_unsigned(int(host))

    return finish
