"""Pieces of device memory copied by kernels, one launch after the other, on a stream that goes before the model's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.core.errors import NoKernelError, TransferError
from kvrelay.kernels.cuda_write import MOST_PIECE_BYTES, Writer, cut_long
from kvrelay.kv_transfer.plan import CopyTable

_TABLE_ROWS = 4096  # of the smallest table: more than 256 MiB in pages of bf16 have
_TABLES = 2  # that are made at once


@dataclass(slots=True, eq=False)
class _Table:
    """Pieces where a kernel reads them: in the host's memory, so that nothing has to be brought to the device first."""

    rows: CopyTable  # [_, 3], pinned
    address: int

    @classmethod
    def of(cls, num_rows: int) -> _Table:
        pinned = torch.empty(num_rows, 3, dtype=torch.int64, pin_memory=True)
        return cls(pinned.numpy(), pinned.data_ptr())  # the array keeps the memory


class PieceWriter:
    """Not locked: one thread owns it."""

    def __init__(self, device: torch.device) -> None:
        self._writer = Writer(device)
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._handle = self.stream.cuda_stream
        self._tables = [_Table.of(_TABLE_ROWS) for _ in range(_TABLES)]  # that no kernel reads
        self._in_use: deque[tuple[_Table, torch.cuda.Event]] = deque()  # and what is recorded behind the kernel

    def write(
        self, source_address: int, target_address: int, pieces: CopyTable, *, num_blocks: int
    ) -> Callable[[], bool]:
        """Start to copy pieces, whose offsets count from these addresses; the returned call says if all have landed.

        Args:
            pieces: offsets and sizes are multiples of cuda_write.ALIGN_BYTES; nobody checks.
            num_blocks: how much of the device is taken for it.

        Raises:
            TransferError: the device refuses.
        """
        longest_bytes = int(np.maximum.reduce(pieces[:, 2]))
        if longest_bytes > MOST_PIECE_BYTES:
            pieces, longest_bytes = cut_long(pieces), MOST_PIECE_BYTES
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            table = self._table(len(pieces))
            table.rows[: len(pieces)] = pieces
            self._writer.write(
                source_address,
                target_address,
                table.address,
                num_pieces=len(pieces),
                longest_bytes=longest_bytes,
                num_blocks=num_blocks,
                stream=self._handle,
            )
            landed.record(self.stream)
        except (NoKernelError, RuntimeError) as err:
            raise TransferError(f"a kernel cannot write: {err}") from err
        self._in_use.append((table, landed))
        return landed.query

    def _table(self, num_rows: int) -> _Table:
        """Return one with room. There are as many as kernels were in flight at once, each as large as it had to be."""
        while self._in_use and self._in_use[0][1].query():  # type: ignore[no-untyped-call]
            self._tables.append(self._in_use.popleft()[0])
        table = self._tables.pop() if self._tables else None
        if table is None or len(table.rows) < num_rows:
            table = _Table.of(max(num_rows, _TABLE_ROWS))
        return table
