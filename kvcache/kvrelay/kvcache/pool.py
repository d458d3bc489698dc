"""The latent pool: every page of a node in one allocation that lives until the process exits.

Rows have two forms. Computed ones are numbers of the model's dtype. Stored ones are what pages hold: the same, or bytes
where the layout's rows are in 8 bits. Stored rows may be turned into computed ones at any time and place, and these are
always the same; what a model attends to are rows that were stored, or its answers would depend on how a prompt is cut.

Shapes in this file: P pages, S page_tokens (rows of a page), T tokens, W = C + R (latent, then rotated rope key), Y
elements of a stored row. A slot is a row's number within a layer: page * page_tokens + row.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kvrelay.core.errors import CapacityError
from kvrelay.core.layout import PageLayout
from kvrelay.kernels import quant

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LatentPool:
    """ONE zeroed allocation [num_layers, P, S, Y], registered once with the transport and never resized.

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
        dtype, width = stored_as(layout)
        shape = (layout.num_layers, num_pages, layout.page_tokens, width)
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
        self._rows = self._pages.view(layout.num_layers, num_pages * layout.page_tokens, width)

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
        """Return a view [P, S, Y] of one layer's stored rows."""
        return self._pages[layer]

    def rows(self, layer: int) -> Tensor:
        """Return a view [P * S, Y] of one layer's stored rows, indexed by slot."""
        return self._rows[layer]

    def read_pages(self, pages: Tensor) -> Tensor:
        """Return a copy [len(pages), num_layers, S, Y] of whole pages; `pages` is int64 on the pool's device."""
        return self._pages.transpose(0, 1).index_select(0, pages)

    def write_pages(self, pages: Tensor, rows: Tensor) -> None:
        """Store whole pages as `read_pages` returned them, on the pool's device."""
        self._pages.transpose(0, 1).index_copy_(0, pages, rows)

    def write(self, layer: int, slots_T: Tensor, rows_TW: Tensor) -> None:
        """Store computed rows; slots_T is int64 on the pool's device and has no duplicates."""
        self.write_stored(layer, slots_T, self.stored(rows_TW))

    def read(self, layer: int, slots_T: Tensor) -> Tensor:
        """Return a copy rows_TW of the rows in `slots_T`, as computed ones."""
        return self.computed(self.read_stored(layer, slots_T))

    def write_stored(self, layer: int, slots_T: Tensor, rows_TY: Tensor) -> None:
        """Store rows as they are; slots_T as in `write`."""
        self._rows[layer].index_copy_(0, slots_T, rows_TY)

    def read_stored(self, layer: int, slots_T: Tensor) -> Tensor:
        """Return a copy rows_TY of the rows in `slots_T`, as they are."""
        return self._rows[layer].index_select(0, slots_T)

    def stored(self, rows_TW: Tensor) -> Tensor:
        """Return the stored form rows_TY of computed rows, which may be these themselves."""
        if self.layout.latent_format == "fp8":
            return quant.quantise(rows_TW, latent_width=self.layout.latent_width)
        return rows_TW.to(self._pages.dtype)

    def computed(self, rows_TY: Tensor) -> Tensor:
        """Return the computed form rows_TW of stored rows, which may be these themselves."""
        if self.layout.latent_format == "fp8":
            dtype = DTYPES[self.layout.dtype]
            return quant.dequantise(rows_TY, latent_width=self.layout.latent_width, dtype=dtype)
        return rows_TY


def stored_as(layout: PageLayout) -> tuple[torch.dtype, int]:
    """Return the dtype of a stored row's elements, and Y, how many there are."""
    if layout.latent_format == "fp8":
        return torch.uint8, layout.row_bytes
    return DTYPES[layout.dtype], layout.row_width


def map_host(num_bytes: int) -> mmap.mmap:
    """Return private anonymous memory, page aligned, in huge pages where the system grants them."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
