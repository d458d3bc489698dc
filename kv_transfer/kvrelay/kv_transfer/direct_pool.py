"""A pool in device memory that writers on the same host map, and the kernel by which we write into theirs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvrelay.core.errors import TransferError
from kvrelay.kernels.cuda_write import write_refuses
from kvrelay.kernels.triton_support import num_processors
from kvrelay.kv_transfer.cuda_ipc import HANDLE_BYTES, close_memory, device_uuid, export_memory, open_memory
from kvrelay.kv_transfer.direct_queue import WHOLE_BYTES
from kvrelay.kv_transfer.piece_writer import PieceWriter
from kvrelay.kv_transfer.plan import CopyTable
from kvrelay.kvcache.pool import LatentPool

log = logging.getLogger(__name__)

# Blocks of the kernel, each a multiprocessor's: as many as fill NVLink between two H200s, and few, as a chunk of a
# prompt is computed beside them.
LINK_BLOCKS = 24


def direct_refuses(pool: LatentPool) -> str | None:
    """Return None, or why pieces of a pool cannot be written into others by a kernel."""
    if pool.device.type != "cuda":
        return "it is not in a GPU's memory"
    if pool.layout.row_bytes % WHOLE_BYTES:
        return f"its rows of {pool.layout.row_bytes} bytes are not whole pieces of {WHOLE_BYTES}"
    why = write_refuses(pool.device)
    return None if why is None else f"the kernel that writes them: {why}"


class DirectPool:
    """Owned by the transfer thread."""

    def __init__(self, pool: LatentPool) -> None:
        """Run the kernel once, before anybody waits for it: the first page is written over itself."""
        self._pool, self._device_id = pool, pool.device.index
        self._uuid = device_uuid(self._device_id)
        self._writer = PieceWriter(pool.device)
        self.write(pool.address, np.array([[0, 0, pool.layout.page_bytes]]), num_blocks=LINK_BLOCKS)
        self._writer.stream.synchronize()

    def export(self) -> tuple[bytes, int]:
        handle, offset_bytes = export_memory(self._pool.address, self._device_id)
        return handle + self._uuid, offset_bytes

    def open(self, handle: bytes, offset_bytes: int, num_bytes: int) -> PeerPool:
        base, mapped_bytes = open_memory(handle[:HANDLE_BYTES], self._device_id)
        # Within a device nothing but its memory limits a kernel: it may have all of it, for a short time.
        is_ours = handle[HANDLE_BYTES:] == self._uuid
        num_blocks = num_processors(self._pool.device) if is_ours else LINK_BLOCKS
        peer = PeerPool(self, base, offset_bytes, self._device_id, num_blocks)
        if (base + offset_bytes) % WHOLE_BYTES or offset_bytes + num_bytes > mapped_bytes:
            peer.close()
            raise TransferError(f"{num_bytes} bytes at {offset_bytes} are no pool in the {mapped_bytes} mapped ones")
        return peer

    def write(self, target_address: int, table: CopyTable, *, num_blocks: int) -> Callable[[], bool]:
        """Start to copy pieces of our pool to memory at an address; the returned call says whether all have landed.

        Raises:
            TransferError: the device refuses.
        """
        return self._writer.write(self._pool.address, target_address, table, num_blocks=num_blocks)


@dataclass(slots=True)
class PeerPool:
    """A peer's pool, mapped."""

    ours: DirectPool
    base: int
    offset_bytes: int
    device_id: int
    num_blocks: int
    closed: bool = field(default=False, init=False)

    def copy(self, table: CopyTable) -> Callable[[], bool]:
        assert not self.closed, "a mapping that was closed"
        return self.ours.write(self.base + self.offset_bytes, table, num_blocks=self.num_blocks)

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
