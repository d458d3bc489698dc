"""What a decode process holds before it is connected: device, model, pool and the data plane's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvrelay.core.errors import SettingsError
from kvrelay.core.types import Incarnation
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.pool_agent import start_agent
from kvrelay.kv_transfer.transport import Cells
from kvrelay.kv_transfer.values import MAX_RING_SIZE
from kvrelay.kvcache.pool import LatentPool
from kvrelay.kvcache.sizing import pool_pages
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model

log = logging.getLogger(__name__)


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
        log.info("%s as %s on %s, %d pages", settings.model, model.dtype_name, device, num_pages)
        return cls(device, model, LatentPool(layout, num_pages, device))

    def transfer(
        self, settings: DecodeSettings, node: Incarnation, *, on_fatal: Callable[[], None]
    ) -> tuple[TransferThread, Cells]:
        """Start the agent of the data plane; return it and the fence cells that writers write into.

        Raises:
            TransferError: the transport does not start.
        """
        # A slot outlives its request for as long as a fence is missing, so there are more slots than requests.
        num_cells = 2 * settings.max_requests * MAX_RING_SIZE
        return start_agent(self.pool, settings, node=node, rank=0, num_cells=num_cells, on_fatal=on_fatal)
