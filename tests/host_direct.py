"""What a GPU does for direct writes, played in host memory between real processes: memory of others, written later."""

from __future__ import annotations

import ctypes
import os
import struct
from collections import deque
from collections.abc import Callable

from kvrelay.core.errors import TransferError
from kvrelay.kv_transfer.plan import CopyTable
from kvrelay.kv_transfer.transport import Region

_HANDLE = struct.Struct("<QQ")  # process, address
_HANDLE_BYTES = 80
_ASKED = 3  # a kernel has ended when it was asked for this often, and all before it have


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


class HostPool:
    """Our own pool. Kernels run in their order, each when it is asked for often enough."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.opened = self.closed = 0
        self.queue: deque[Kernel] = deque()
        self.hangs = False  # no kernel ends any more

    def export(self) -> tuple[bytes, int]:
        return _HANDLE.pack(os.getpid(), self.region.address - 16).ljust(_HANDLE_BYTES, b"\0"), 16

    def open(self, handle: bytes, offset_bytes: int, num_bytes: int) -> HostPeer:
        process, base = _HANDLE.unpack_from(handle)
        try:
            os.kill(process, 0)
        except OSError as err:
            raise TransferError(f"no process {process}") from err
        self.opened += 1
        return HostPeer(self, process, base + offset_bytes)


class HostPeer:
    """Memory of another process; writing into a dead one does nothing, as what a GPU keeps mapped is nobody's."""

    def __init__(self, ours: HostPool, process: int, address: int) -> None:
        self.ours, self.process, self.address, self.is_open = ours, process, address, True

    def copy(self, table: CopyTable) -> Callable[[], bool]:
        kernel = Kernel(self, table.copy())
        self.ours.queue.append(kernel)
        return kernel.landed

    def close(self) -> None:
        assert self.is_open, "closed twice"
        assert all(kernel.peer is not self for kernel in self.ours.queue), "closed under a kernel"
        self.is_open = False
        self.ours.closed += 1


class Kernel:
    def __init__(self, peer: HostPeer, table: CopyTable) -> None:
        self.peer, self.table, self.asked, self.ended = peer, table, 0, False

    def landed(self) -> bool:
        queue = self.peer.ours.queue
        self.asked += 1
        if self.asked >= _ASKED and not self.ended and queue[0] is self and not self.peer.ours.hangs:
            self._run()
            self.ended = True
            queue.popleft()
        return self.ended

    def _run(self) -> None:
        assert self.peer.is_open, "a kernel writes through a closed mapping"
        for source, target, num_bytes in self.table.tolist():
            here = _Piece(self.peer.ours.region.address + source, num_bytes)
            there = _Piece(self.peer.address + target, num_bytes)
            if num_bytes:
                _libc.process_vm_writev(self.peer.process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
