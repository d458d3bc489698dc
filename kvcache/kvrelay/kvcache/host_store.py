"""Host memory for pages that leave the pool: one allocation, made at start, and the copies to and from it.

Shapes in this file: H host pages, n pages of one copy, L layers, S page_tokens, Y elements of a stored row.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from kvrelay.core.errors import CapacityError, SettingsError
from kvrelay.core.layout import PageLayout
from kvrelay.kvcache.allocator import runs_of
from kvrelay.kvcache.pool import LatentPool, map_host, stored_as

_PAGES_AT_ONCE = 16  # a copy of more goes in pieces, since each is gathered on the device first


def host_pages(layout: PageLayout, *, gib: float) -> int:
    """Return how many pages fit into `gib` GiB; 0 when there is no host tier.

    Raises:
        SettingsError: not even one fits.
    """
    pages = int(gib * (1 << 30)) // layout.page_bytes_all_layers
    if gib and not pages:
        raise SettingsError(f"host_cache_gib={gib}: a page needs {layout.page_bytes_all_layers} bytes")
    return pages


@dataclass(frozen=True, slots=True)
class Launched:
    """What the compute thread has launched up to now; a copy begins behind it."""

    event: torch.cuda.Event | None  # None on CPUs, where everything is done when it returns


class HostStore:
    """Pages [H, L, S, Y] in host memory beside a pool; locked for the pool's GPU, if it is on one.

    A page of it holds what a page of the pool holds in all layers. Who holds which page is not its business. One thread
    may save while another one loads.
    """

    def __init__(self, pool: LatentPool, num_pages: int) -> None:
        """Allocate, touch and lock the memory.

        Raises:
            CapacityError: it cannot be had; names the bytes.
        """
        assert num_pages > 0, "a store has at least one page"
        layout = pool.layout
        self.page_bytes = layout.page_bytes_all_layers
        self._pool = pool
        num_bytes, free_bytes = num_pages * self.page_bytes, psutil.virtual_memory().available
        if num_bytes > free_bytes:
            raise CapacityError(f"host_cache_gib: {num_bytes} bytes of host memory wanted, {free_bytes} are free")
        try:
            self._mapping: mmap.mmap = map_host(num_bytes)
        except OSError as err:
            raise CapacityError(f"no {num_bytes} bytes of host memory for evicted blocks: {err}") from err
        raw = torch.frombuffer(self._mapping, dtype=torch.uint8).zero_()
        dtype, width = stored_as(layout)
        self._rows = raw.view(dtype).view(num_pages, layout.num_layers, layout.page_tokens, width)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to save on, and to load on
        self._is_locked = False
        if pool.device.type == "cuda":
            # Registered and not from torch's allocator of locked memory, which rounds up to a power of two.
            status = torch.cuda.cudart().cudaHostRegister(self._rows.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
            if int(status):
                raise CapacityError(f"{num_bytes} bytes of host memory cannot be locked for the GPU: error {status}")
            self._is_locked = True
            self._streams = torch.cuda.Stream(pool.device), torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Unlock the memory; no copy may be in progress."""
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._rows.data_ptr())  # type: ignore[no-untyped-call]
            self._is_locked = False

    def bind_thread(self) -> None:
        """Make the pool's device the one of the calling thread."""
        self._pool.bind_thread()

    def launched(self) -> Launched:
        """Return a mark of what the calling thread has launched; a copy must come behind it.

        What computes a page's rows, or still reads what a page held before, may only have been launched.
        """
        if self._streams is None:
            return Launched(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Launched(event)

    @torch.inference_mode()
    def save(self, pool_pages: Sequence[int], store_pages: Sequence[int], after: Launched) -> None:
        """Copy pages of the pool into pages of the store; returns when they are there."""
        with self._copying(after, stream=0):
            for at in range(0, len(pool_pages), _PAGES_AT_ONCE):
                rows = self._pool.read_pages(self._index(pool_pages[at : at + _PAGES_AT_ONCE]))
                done = 0
                for run in runs_of(store_pages[at : at + _PAGES_AT_ONCE]):
                    target = self._rows[run.first_page : run.first_page + run.num_pages]
                    target.copy_(rows[done : done + run.num_pages], non_blocking=True)
                    done += run.num_pages

    @torch.inference_mode()
    def load(self, store_pages: Sequence[int], pool_pages: Sequence[int], after: Launched) -> None:
        """Copy pages of the store into pages of the pool; returns when they are there."""
        with self._copying(after, stream=1):
            for at in range(0, len(store_pages), _PAGES_AT_ONCE):
                some = store_pages[at : at + _PAGES_AT_ONCE]
                rows = self._rows.new_empty((len(some), *self._rows.shape[1:]), device=self._pool.device)
                done = 0
                for run in runs_of(some):
                    source = self._rows[run.first_page : run.first_page + run.num_pages]
                    rows[done : done + run.num_pages].copy_(source, non_blocking=True)
                    done += run.num_pages
                self._pool.write_pages(self._index(pool_pages[at : at + _PAGES_AT_ONCE]), rows)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._pool.device)

    @contextmanager
    def _copying(self, after: Launched, *, stream: int) -> Iterator[None]:
        """On a GPU: copy on a stream of its own, behind what was launched, and wait for the end without spinning."""
        if self._streams is None or after.event is None:
            yield
            return
        ours = self._streams[stream]
        with torch.cuda.stream(ours):
            ours.wait_event(after.event)
            yield
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(ours)
        done.synchronize()
