"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MOST_KEPT_BYTES = 64 << 20
_LARGEST_KEPT_BYTES = 32 << 20  # the most that glibc takes


def keep() -> None:
    """Let freed memory serve the next message instead of going back to the kernel; of each arena's end at most 64 MiB.

    A prompt of a million tokens is 4 MiB in each of several copies. glibc would map and unmap every one, and the kernel
    clear its thousand pages each time, which takes longer than all else that a router does with the prompt. To be
    called before there are threads. C libraries that have no such setting go on as they do.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
