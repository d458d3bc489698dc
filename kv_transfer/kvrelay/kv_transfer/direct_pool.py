"""A pool in device memory that writers on the same host map, and the kernel by which we write into theirs."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrelay.core.errors import TransferError
from kvrelay.kernels.triton_support import triton_refuses
from kvrelay.kv_transfer.cuda_ipc import close_memory, export_memory, open_memory
from kvrelay.kv_transfer.direct import WHOLE_BYTES
from kvrelay.kv_transfer.plan import CopyTable
from kvrelay.kvcache.pool import LatentPool

log = logging.getLogger(__name__)

# Programs of the kernel: as many as fill NVLink between two H200s (0.91 of a plain copy's speed; 16 give 0.86, 132 give
# 0.93), and few, as a chunk of a prompt is computed beside them.
NUM_PROGRAMS = 24
_MOST_TABLES = 64


def direct_refuses(pool: LatentPool) -> str | None:
    """Return None, or why pieces of a pool cannot be written into others by a kernel."""
    if pool.device.type != "cuda":
        return "it is not in a GPU's memory"
    if pool.layout.row_bytes % WHOLE_BYTES:
        return f"its rows of {pool.layout.row_bytes} bytes are not whole pieces of {WHOLE_BYTES}"
    return triton_refuses(pool.device.type)


class DirectPool:
    """Owned by the transfer thread. Kernels run on a stream of its own that goes before the model's."""

    def __init__(self, pool: LatentPool, *, num_programs: int = NUM_PROGRAMS) -> None:
        """Build the kernel, before anybody waits for it: the first page is written over itself."""
        self._pool, self._num_programs = pool, num_programs
        self._device_id = pool.device.index
        self._tables: OrderedDict[bytes, tuple[Tensor, int]] = OrderedDict()
        self._stream = torch.cuda.Stream(pool.device, priority=-1)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(pool.device))
        self.write(pool.address, torch.tensor([[0, 0, pool.layout.page_bytes]]).numpy())
        self._stream.synchronize()

    def export(self) -> tuple[bytes, int]:
        return export_memory(self._pool.address, self._device_id)

    def open(self, handle: bytes, offset_bytes: int, num_bytes: int) -> PeerPool:
        base, mapped_bytes = open_memory(handle, self._device_id)
        peer = PeerPool(self, base, offset_bytes, self._device_id)
        if (base + offset_bytes) % WHOLE_BYTES or offset_bytes + num_bytes > mapped_bytes:
            peer.close()
            raise TransferError(f"{num_bytes} bytes at {offset_bytes} are no pool in the {mapped_bytes} mapped ones")
        return peer

    def write(self, target_address: int, table: CopyTable) -> Callable[[], bool]:
        """Start to copy pieces of our pool to memory at an address; the returned call says whether all have landed.

        Raises:
            TransferError: the device refuses.
        """
        from kvrelay.kernels.triton_write import write_pieces  # noqa: PLC0415 - optional

        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        source, target, _ = table[0].tolist()
        try:
            with torch.cuda.stream(self._stream):
                pieces, units_each = self._pieces(table)
                write_pieces(
                    self._pool.address + source, target_address + target, pieces, units_each,
                    num_programs=self._num_programs,
                )  # fmt: skip
            landed.record(self._stream)
        except RuntimeError as err:
            raise TransferError(f"a kernel cannot write: {err}") from err
        return landed.query

    def _pieces(self, table: CopyTable) -> tuple[Tensor, int]:
        """Return the pieces of copies, from where the first one begins: a part has the same in every layer."""
        from kvrelay.kernels.triton_write import pieces_to_write  # noqa: PLC0415 - optional

        relative = table.copy()
        relative[:, :2] -= table[0, :2]
        key = relative.tobytes()
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = pieces_to_write(relative, self._pool.device)
            if len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)  # its memory is used again behind the kernels of this stream only
        else:
            self._tables.move_to_end(key)
        return found


@dataclass(slots=True)
class PeerPool:
    """A peer's pool, mapped."""

    ours: DirectPool
    base: int
    offset_bytes: int
    device_id: int
    closed: bool = field(default=False, init=False)

    def copy(self, table: CopyTable) -> Callable[[], bool]:
        assert not self.closed, "a mapping that was closed"
        return self.ours.write(self.base + self.offset_bytes, table)

    def close(self) -> None:
        assert not self.closed, "a mapping is closed once"
        self.closed = True
        # The driver waits until the device has done all that was launched, which may be a whole prompt.
        threading.Thread(target=self._unmap, name="unmap", daemon=True).start()

    def _unmap(self) -> None:
        try:
            close_memory(self.base, self.device_id)
        except TransferError as err:
            log.warning("a peer's pool stays mapped: %s", err)
