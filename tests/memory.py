"""Plain host memory as a region that a transport can register."""

from __future__ import annotations

import ctypes
import mmap

from kvrelay.kv_transfer.transport import Region


def region_of(memory: mmap.mmap) -> Region:
    return Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
