"""The latent pool: every page of a node in one allocation that lives until the process exits.

Shapes in this file: P pages, S page_tokens (rows of a page), T tokens, W = C + R (latent, then rotated rope key).
A slot is a row's number within a layer: page * page_tokens + row.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kvrelay.core.errors import CapacityError
from kvrelay.core.layout import PageLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LatentPool:
    """ONE zeroed allocation [num_layers, P, S, W], registered once with the transport and never resized.

    Host memory is page aligned and touched at start, so that the first request pays for no page fault and a transport
    can register it as it is. Not locked: the step thread owns all rows but those reserved for a hand-off.
    """

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device) -> None:
        """Allocate and zero the pool.

        Raises:
            CapacityError: the memory cannot be had; names the bytes wanted.
        """
        assert num_pages > 0, "a pool has at least one page"
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self.num_bytes = num_pages * layout.page_bytes_all_layers
        self._mapping: mmap.mmap | None = None
        shape = (layout.num_layers, num_pages, layout.page_tokens, layout.row_width)
        dtype = DTYPES[layout.dtype]
        try:
            if device.type == "cpu":
                self._mapping = _map_host(self.num_bytes)
                self._pages = torch.frombuffer(self._mapping, dtype=dtype).view(shape).zero_()
            else:
                self._pages = torch.zeros(shape, dtype=dtype, device=device)
        except (OSError, torch.OutOfMemoryError) as err:
            raise CapacityError(
                f"no memory for {num_pages} pages: {self.num_bytes} bytes wanted on {device}: {err}"
            ) from err
        self._rows = self._pages.view(layout.num_layers, num_pages * layout.page_tokens, layout.row_width)

    def bind_thread(self) -> None:
        """Make the pool's device the one of the calling thread; every thread that computes does so first.

        To CUDA the current device belongs to the thread, and a new thread begins at number 0.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def address(self) -> int:
        """Address of byte 0; offsets of `PageLayout.offset_bytes` count from here."""
        return self._pages.data_ptr()

    def memory(self) -> memoryview:
        """Return all bytes of the pool, writable. Host memory only."""
        assert self._mapping is not None, "only host memory has a memoryview"
        return memoryview(self._mapping)[: self.num_bytes]

    def layer(self, layer: int) -> Tensor:
        """Return a view [P, S, W] of one layer."""
        return self._pages[layer]

    def rows(self, layer: int) -> Tensor:
        """Return a view [P * S, W] of one layer, indexed by slot."""
        return self._rows[layer]

    def write(self, layer: int, slots_T: Tensor, rows_TW: Tensor) -> None:
        """Store rows, converted to the pool's dtype; slots_T is int64 on the pool's device and has no duplicates."""
        rows = self._rows[layer]
        rows.index_copy_(0, slots_T, rows_TW.to(rows.dtype))

    def read(self, layer: int, slots_T: Tensor) -> Tensor:
        """Return a copy rows_TW of the rows in `slots_T`, in the pool's dtype."""
        return self._rows[layer].index_select(0, slots_T)


def _map_host(num_bytes: int) -> mmap.mmap:
    """Return private anonymous memory, page aligned, in huge pages where the system grants them."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
