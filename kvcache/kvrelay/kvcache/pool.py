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

    Behind the pages lies room for staging, if wanted: rows packed there leave as one piece.

    Host memory is page aligned and touched at start, so that the first request pays for no page fault and a transport
    can register it as it is. Not locked: the step thread owns all rows but those reserved for a hand-off.
    """

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device, *, staging_bytes: int = 0) -> None:
        """Allocate and zero the pool.

        Args:
            staging_bytes: of room behind the pages; whole words of 8 bytes.

        Raises:
            CapacityError: the memory cannot be had; names the bytes wanted.
        """
        assert num_pages > 0, "a pool has at least one page"
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self.num_bytes = num_pages * layout.page_bytes_all_layers
        self.staging_bytes = staging_bytes
        self._mapping: mmap.mmap | None = None
        shape = (layout.num_layers, num_pages, layout.page_tokens, layout.row_width)
        dtype = DTYPES[layout.dtype]
        try:
            if device.type == "cpu":
                self._mapping = map_host(self.region_bytes)
                self._all = torch.frombuffer(self._mapping, dtype=torch.uint8).zero_()
            else:
                self._all = torch.zeros(self.region_bytes, dtype=torch.uint8, device=device)
        except (OSError, torch.OutOfMemoryError) as err:
            raise CapacityError(
                f"no memory for {num_pages} pages: {self.region_bytes} bytes wanted on {device}: {err}"
            ) from err
        self._pages = self._all[: self.num_bytes].view(dtype).view(shape)
        self._rows = self._pages.view(layout.num_layers, num_pages * layout.page_tokens, layout.row_width)

    def bind_thread(self) -> None:
        """Make the pool's device the one of the calling thread; every thread that computes does so first.

        To CUDA the current device belongs to the thread, and a new thread begins at number 0.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def region_bytes(self) -> int:
        """Bytes to register: the pages, and the staging behind them, which begins at `num_bytes`."""
        return self.num_bytes + self.staging_bytes

    def words(self) -> Tensor:
        """Return a view of the whole region as int64 words; pages are whole words."""
        return self._all.view(torch.int64)

    @property
    def address(self) -> int:
        """Address of byte 0; offsets of `PageLayout.offset_bytes` count from here."""
        return self._pages.data_ptr()

    def memory(self) -> memoryview:
        """Return all bytes of the pages, writable. Host memory only."""
        assert self._mapping is not None, "only host memory has a memoryview"
        return memoryview(self._mapping)[: self.num_bytes]

    def layer(self, layer: int) -> Tensor:
        """Return a view [P, S, W] of one layer."""
        return self._pages[layer]

    def rows(self, layer: int) -> Tensor:
        """Return a view [P * S, W] of one layer, indexed by slot."""
        return self._rows[layer]

    def read_pages(self, pages: Tensor) -> Tensor:
        """Return a copy [len(pages), num_layers, S, W] of whole pages; `pages` is int64 on the pool's device."""
        return self._pages.transpose(0, 1).index_select(0, pages)

    def write_pages(self, pages: Tensor, rows: Tensor) -> None:
        """Store whole pages as `read_pages` returned them, in the pool's dtype and on its device."""
        self._pages.transpose(0, 1).index_copy_(0, pages, rows)

    def write(self, layer: int, slots_T: Tensor, rows_TW: Tensor) -> None:
        """Store rows, converted to the pool's dtype; slots_T is int64 on the pool's device and has no duplicates."""
        rows = self._rows[layer]
        rows.index_copy_(0, slots_T, rows_TW.to(rows.dtype))

    def read(self, layer: int, slots_T: Tensor) -> Tensor:
        """Return a copy rows_TW of the rows in `slots_T`, in the pool's dtype."""
        return self._rows[layer].index_select(0, slots_T)


def map_host(num_bytes: int) -> mmap.mmap:
    """Return private anonymous memory, page aligned, in huge pages where the system grants them."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
