"""Where fences are written: one number of eight bytes per (epoch slot, rank), in memory of the pool's kind."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from kvrelay.core.errors import CapacityError
from kvrelay.kv_transfer.transport import CELL_BYTES, Cells, Region
from kvrelay.kv_transfer.values import MAX_RING_SIZE

if TYPE_CHECKING:
    from torch import Tensor


class HostCells:
    """Cells in page-aligned host memory, zero at first."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self._memory = mmap.mmap(-1, num_cells * CELL_BYTES)
        self._cells = memoryview(self._memory).cast("Q")
        self.region = Region(_address_of(self._memory), num_cells * CELL_BYTES)

    def store(self, cell: int, value: int) -> None:
        self._cells[cell] = value

    def load(self, cell: int) -> int:
        return self._cells[cell]


class TensorCells:
    """Cells in a tensor, for pools in device memory: a fence must take the same way as the data it follows."""

    def __init__(self, cells: Tensor) -> None:
        """Take an int64 tensor [num_cells] on the pool's device; the caller keeps nothing else in it."""
        assert str(cells.dtype) == "torch.int64", f"{cells.dtype} cells"
        assert cells.is_contiguous()
        self._cells = cells
        self.num_cells = cells.numel()
        device_id = cells.device.index if cells.device.type == "cuda" else None
        self.region = Region(cells.data_ptr(), cells.numel() * CELL_BYTES, -1 if device_id is None else device_id)

    def store(self, cell: int, value: int) -> None:
        self._cells[cell] = value
        if self._cells.is_cuda:
            # The transport reads device memory outside of torch's streams.
            import torch  # noqa: PLC0415 (a node without a GPU may be without torch here)

            torch.cuda.current_stream(self._cells.device).synchronize()

    def load(self, cell: int) -> int:
        return int(self._cells[cell])


class FenceSlots:
    """Which epochs own which cells. A slot comes back only when nothing can be written to it any more."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._free = list(range(cells.num_cells // MAX_RING_SIZE))[::-1]
        self.num_slots = len(self._free)

    def take(self) -> int:
        """Return a free slot.

        Raises:
            CapacityError: all are taken.
        """
        if not self._free:
            raise CapacityError(f"all {self.num_slots} fence slots are taken: too many hand-offs at once")
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def written(self, slot: int, rank: int) -> int:
        """Return the number in one rank's cell: the counter of the last epoch that was fenced through it."""
        return self._cells.load(cell_of(slot, rank))


def cell_of(slot: int, rank: int) -> int:
    return slot * MAX_RING_SIZE + rank


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
