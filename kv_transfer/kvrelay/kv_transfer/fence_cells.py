"""Where fences are written, and from where: eight-byte numbers in memory of the pool's kind.

Cells belong to peers: only they write, and a number in one is a proof. Sources are our own: what our fences to peers
are read from. They never share memory, so that no number of ours can pass for a proof of a peer, or wipe one out.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType, Protocol, Self

from kvrelay.core.errors import CapacityError, TransferError
from kvrelay.kv_transfer.transport import CELL_BYTES, Region
from kvrelay.kv_transfer.values import MAX_RING_SIZE

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Stream

NUM_SOURCES = 4096  # one per fence that is being written; more than a node has hand-offs
Source = NewType("Source", int)  # number of a source, not of a cell


class _Numbers(Protocol):
    """Numbers in registered memory, zero at first."""

    @property
    def region(self) -> Region: ...
    def store(self, at: int, value: int) -> None: ...
    def load(self, at: int) -> int: ...


class FenceCells:
    """One cell per (epoch slot, rank), in a region that peers are told of. Nothing here writes into it."""

    def __init__(self, numbers: _Numbers) -> None:
        self._numbers = numbers
        self.region = numbers.region
        self.num_cells = numbers.region.num_bytes // CELL_BYTES

    def load(self, cell: int) -> int:
        """Return what a peer wrote last; 0 = nobody did."""
        return self._numbers.load(cell)


class FenceSources:
    """The numbers of our fences while they are being written to peers. Owned by the thread that writes them."""

    def __init__(self, numbers: _Numbers) -> None:
        self._numbers = numbers
        self.region = numbers.region
        self.num_sources = numbers.region.num_bytes // CELL_BYTES
        # In turn, so that a number stays in its place long after a fence that failed.
        self._free = deque(Source(at) for at in range(self.num_sources))

    def take(self, value: int) -> Source:
        """Put a number into a free source, which stays as it is until it is given back.

        Raises:
            TransferError: all are in use.
        """
        if not self._free:
            raise TransferError(f"all {self.num_sources} fence sources are in use")
        source = self._free.popleft()
        self._numbers.store(source, value)
        return source

    def give_back(self, source: Source) -> None:
        """The fence has ended."""
        self._free.append(source)


@dataclass(frozen=True, slots=True)
class FenceMemory:
    """What one agent needs for fences, in both directions."""

    cells: FenceCells
    sources: FenceSources

    @classmethod
    def on_host(cls, num_cells: int, *, num_sources: int = NUM_SOURCES) -> Self:
        return cls(FenceCells(_HostNumbers(num_cells)), FenceSources(_HostNumbers(num_sources)))

    @classmethod
    def in_tensor(cls, cells: Tensor, *, num_sources: int = NUM_SOURCES) -> Self:
        """Use memory of a pool's device: a fence must take the same way as the data it follows.

        Args:
            cells: int64 [num_cells], zeros, on that device; the caller keeps nothing else in it.
        """
        return cls(FenceCells(_TensorNumbers(cells)), FenceSources(_TensorNumbers(cells.new_zeros(num_sources))))


class FenceSlots:
    """Which epochs own which cells. A slot comes back only when nothing can be written to it any more."""

    def __init__(self, cells: FenceCells) -> None:
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


class _HostNumbers:
    """In page-aligned host memory."""

    def __init__(self, num_cells: int) -> None:
        self._memory = mmap.mmap(-1, num_cells * CELL_BYTES)
        self._numbers = memoryview(self._memory).cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.region = Region(address, num_cells * CELL_BYTES)

    def store(self, at: int, value: int) -> None:
        self._numbers[at] = value

    def load(self, at: int) -> int:
        return self._numbers[at]


class _TensorNumbers:
    """In memory of a device, by way of a stream of its own: on that of the model a fence would wait for all chunks and
    steps that are queued there, and with it the thread that transfers, or the event loop.
    """

    def __init__(self, numbers: Tensor) -> None:
        assert str(numbers.dtype) == "torch.int64", f"{numbers.dtype} numbers"
        assert numbers.is_contiguous()
        self._numbers = numbers
        device_id = numbers.device.index if numbers.device.type == "cuda" else None
        self.region = Region(numbers.data_ptr(), numbers.numel() * CELL_BYTES, -1 if device_id is None else device_id)
        self._stream: Stream | None = None
        if numbers.is_cuda:
            import torch  # noqa: PLC0415 (a node without a GPU may be without torch here)

            self._stream = torch.cuda.Stream(numbers.device, priority=-1)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(numbers.device))  # which makes the zeros

    def store(self, at: int, value: int) -> None:
        with self._on_stream():
            self._numbers[at] = value
        if self._stream is not None:
            self._stream.synchronize()  # the transport reads outside of torch's streams

    def load(self, at: int) -> int:
        with self._on_stream():
            return int(self._numbers[at])

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        import torch  # noqa: PLC0415

        return torch.cuda.stream(self._stream)
