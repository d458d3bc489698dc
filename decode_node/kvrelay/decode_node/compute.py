"""What a decode process holds before it is connected: device, model, pool and the data plane's thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import xxhash

from kvrelay.core.errors import SettingsError
from kvrelay.core.types import Counters, Incarnation
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.fence_cells import HostCells, TensorCells
from kvrelay.kv_transfer.local import LocalPool
from kvrelay.kv_transfer.transport import Cells, Region, Transport, agent_name
from kvrelay.kv_transfer.values import MAX_RING_SIZE
from kvrelay.kvcache.checksum import checksum_ranges
from kvrelay.kvcache.pool import LatentPool
from kvrelay.kvcache.sizing import pool_pages
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model

_log = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """Return the device that a setting names.

    Raises:
        SettingsError: there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise SettingsError(f"device {device} is wanted; there are {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device)
    return device


@dataclass(frozen=True, slots=True)
class Compute:
    """Loaded and allocated, but not connected yet."""

    device: torch.device
    model: Model
    pool: LatentPool

    @classmethod
    def load(cls, settings: DecodeSettings) -> Compute:
        """Load the model and allocate the pool.

        Raises:
            ModelLoadError, SettingsError, CapacityError: it cannot be done; the message says what was wanted.
        """
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = choose_device(settings.device)
        model = load_model(
            Path(settings.model), dtype=settings.dtype, device=device, max_model_len=settings.max_model_len or None
        )
        layout = model.layout(block_tokens=settings.block_tokens)
        on_gpu = device.type == "cuda"
        num_pages = pool_pages(
            layout,
            pages=settings.pool_pages,
            mib=settings.pool_mib,
            free_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available,
            longest_tokens=model.config.max_model_len,
            on_gpu=on_gpu,
        )
        _log.info("%s as %s on %s, %d pages", settings.model, model.dtype_name, device, num_pages)
        return cls(device, model, LatentPool(layout, num_pages, device))

    def local_pool(self) -> LocalPool:
        """Return the pool as the hand-off sees it: bytes and their checksums."""
        pool = self.pool
        if self.device.type == "cpu":
            memory = pool.memory()
            return LocalPool(pool.layout, pool.num_pages, lambda ranges: checksum_ranges(memory, ranges))
        return LocalPool(pool.layout, pool.num_pages, lambda ranges: _checksum_on_device(pool, ranges))

    def transfer(
        self, settings: DecodeSettings, node: Incarnation, *, on_fatal: Callable[[], None]
    ) -> tuple[TransferThread, Cells]:
        """Start the agent of the data plane; return it and the fence cells that writers write into.

        Raises:
            TransferError: the transport does not start.
        """
        # UCX reads these when it is loaded, which is when the agent is made.
        if settings.net_devices:
            os.environ["UCX_NET_DEVICES"] = settings.net_devices
        if settings.tcp_port_range:
            os.environ["UCX_TCP_PORT_RANGE"] = settings.tcp_port_range
        device_id = self.device.index if self.device.type == "cuda" else -1
        # A slot outlives its request for as long as a fence is missing, so there are more slots than requests.
        num_cells = 2 * settings.max_requests * MAX_RING_SIZE
        cells: Cells = HostCells(num_cells)
        if self.device.type == "cuda":
            cells = TensorCells(torch.zeros(num_cells, dtype=torch.int64, device=self.device))
        region = Region(self.pool.address, self.pool.num_bytes, device_id)

        def make(counters: Counters) -> Transport:
            from kvrelay.kv_transfer.nixl import NixlTransport  # noqa: PLC0415 - after the variables above are set

            return NixlTransport(
                agent_name=agent_name(node, 0),
                pool=region,
                pool_pages=self.pool.num_pages,
                cells=cells,
                counters=counters,
            )

        transfer = TransferThread(make, on_fatal=on_fatal)
        transfer.start()
        return transfer, cells


def _checksum_on_device(pool: LatentPool, ranges: Sequence[tuple[int, int]]) -> int:
    """Return what `checksum_ranges` would over the bytes of a pool in device memory; a range lies in one layer."""
    layout = pool.layout
    rows_per_layer = pool.num_pages * layout.page_tokens
    digest = xxhash.xxh3_64()
    for offset_bytes, num_bytes in ranges:
        layer, first = divmod(offset_bytes // layout.row_bytes, rows_per_layer)
        rows = pool.rows(layer)[first : first + num_bytes // layout.row_bytes].cpu()
        digest.update(rows.view(torch.uint8).numpy().data)
    return digest.intdigest()
