"""Scattered pieces of one memory written to scattered places of another, which may belong to another device.

In CUDA C++ (cuda/write.cu), for Hopper and newer: bulk copies through shared memory, which fill a link with few
multiprocessors.

Shapes in this file: G pieces.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.kernels import nvrtc

SOURCE = Path(__file__).with_name("cuda") / "write.cu"
ALIGN_BYTES = 16  # of offsets and sizes
UNIT_BYTES = 36 << 10  # moved at once; a page of 64 rows in bf16 is two of them
STAGES, AHEAD = 5, 3  # units in shared memory, and those of them that are being read
MOST_PIECE_BYTES = 8 * UNIT_BYTES  # every piece of a launch takes as many turns as the longest
_LINE_BYTES = 128
_THREADS = 32

Pieces = npt.NDArray[np.int64]  # [G, 3]: source offset, target offset, bytes


class Arguments(ctypes.Structure):
    """`Args` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target", "pieces")),
        *((name, ctypes.c_uint32) for name in ("num_units", "units_each", "unit_bytes")),
    )

    @classmethod
    def of(
        cls, source: int, target: int, pieces: int, *, num_pieces: int, longest_bytes: int, most_unit_bytes: int
    ) -> Arguments:
        """Point at memories and a table of pieces, and cut each piece into as many units of one size."""
        units_each = max(1, -(-longest_bytes // most_unit_bytes))
        unit_bytes = -(-longest_bytes // (units_each * _LINE_BYTES)) * _LINE_BYTES
        return cls(source, target, pieces, num_pieces * units_each, units_each, unit_bytes)


def write_refuses(device: torch.device) -> str | None:
    """Return None, or why there is no kernel for a device. What nothing else speaks against is compiled."""
    if device.type != "cuda":
        return f"runs on cuda, not {device.type}"
    if (why := nvrtc.nvrtc_refuses()) is not None:
        return why
    if torch.cuda.get_device_capability(device)[0] < 9:
        return f"is written for Hopper and newer, not compute capability {torch.cuda.get_device_capability(device)}"
    return nvrtc.build_refuses("kernel that writes pieces", lambda: _compiled(device))


def cut_long(pieces_G3: Pieces) -> Pieces:
    """Return the same pieces, of which none is longer than a kernel takes: it takes all for as long as the longest."""
    cuts = np.maximum(-(-pieces_G3[:, 2] // MOST_PIECE_BYTES), 1)
    done = (np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * MOST_PIECE_BYTES
    source, target, num_bytes = np.repeat(pieces_G3, cuts, axis=0).T
    return np.stack((source + done, target + done, np.minimum(num_bytes - done, MOST_PIECE_BYTES)), axis=1)


class Writer:
    """The kernel on one device."""

    def __init__(self, device: torch.device) -> None:
        """Raise NoKernelError where it cannot be built."""
        self._kernel = _compiled(device)

    def write(
        self,
        source_address: int,
        target_address: int,
        pieces_address: int,
        *,
        num_pieces: int,
        longest_bytes: int,
        num_blocks: int,
        stream: int,
    ) -> None:
        """Copy pieces of the memory at one address to that at another; one launch, no wait. Nothing is checked.

        Args:
            source_address, target_address: in reach of the device; multiples of ALIGN_BYTES.
            pieces_address: int64 [num_pieces, 3], C order: offsets in both memories and bytes, multiples of
                ALIGN_BYTES. The device must reach it, as it does pinned memory of the host, and it must stay until the
                kernel has ended.
            longest_bytes: of the pieces, at most MOST_PIECE_BYTES.
            num_blocks: what of the device is taken for it: multiprocessors, at most.
            stream: CUDA's handle.

        Raises:
            NoKernelError: the driver refuses.
        """
        arguments = Arguments.of(
            source_address,
            target_address,
            pieces_address,
            num_pieces=num_pieces,
            longest_bytes=longest_bytes,
            most_unit_bytes=UNIT_BYTES,
        )
        grid = (max(1, min(num_blocks, arguments.num_units)), 1)
        self._kernel.launch(grid, _THREADS, arguments, stream=stream)


@functools.cache
def _compiled(device: torch.device) -> nvrtc.Kernel:
    looked_up_bytes = 3 * 8 * 2 * _THREADS
    shared_bytes = STAGES * (UNIT_BYTES + 8) + looked_up_bytes
    defines = {"UNIT": UNIT_BYTES, "STAGES": STAGES, "AHEAD": AHEAD}
    return nvrtc.compile_kernel(SOURCE, "write_pieces", defines, device=device, shared_bytes=shared_bytes)
