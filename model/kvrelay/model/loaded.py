"""A model and its pool of latents on a device, as the settings of a node say: what nodes of either kind begin with."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvrelay.core.errors import SettingsError
from kvrelay.core.settings import NodeSettings
from kvrelay.kvcache.pool import LatentPool
from kvrelay.kvcache.sizing import pool_pages
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model

log = logging.getLogger(__name__)


def choose_device(name: str, *, local_rank: int = 0, num_ranks: int = 1) -> torch.device:
    """Return the device that a setting names, and make it this process's; `auto` is a GPU where there are GPUs.

    Args:
        name: auto, cpu, cuda (the GPU with the number of the rank) or cuda:N.
        local_rank: number of this process among the ranks on its host.
        num_ranks: ranks that share the setting.

    Raises:
        SettingsError: several ranks were given the same GPU, or there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda" and num_ranks > 1:
        raise SettingsError(f"device {name} cannot be that of {num_ranks} ranks; use auto")
    number = str(local_rank) if name == "cuda" else name.removeprefix("cuda:")
    if not (name.startswith("cuda") and number.isdecimal()):
        raise SettingsError(f"device {name} is none of auto, cpu, cuda and cuda:N")
    index = int(number)
    if index >= torch.cuda.device_count():
        raise SettingsError(f"device cuda:{index} is wanted; there are {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loaded and allocated, but not connected yet."""

    device: torch.device
    model: Model
    pool: LatentPool

    @classmethod
    def load(
        cls, settings: NodeSettings, *, local_rank: int = 0, num_ranks: int = 1, gpu_staging_bytes: int = 0
    ) -> Loaded:
        """Load the model and allocate the pool.

        Args:
            local_rank, num_ranks: see `choose_device`; ranks on CPUs share their host's free memory.
            gpu_staging_bytes: of the pool's staging on a GPU.

        Raises:
            ModelLoadError, SettingsError, CapacityError: it cannot be done; the message says what was wanted.
        """
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = choose_device(settings.device, local_rank=local_rank, num_ranks=num_ranks)
        model = load_model(
            Path(settings.model), dtype=settings.dtype, device=device, max_model_len=settings.max_model_len or None
        )
        try:
            layout = model.layout(block_tokens=settings.block_tokens, latent_format=settings.latent_format)
        except ValueError as err:
            raise SettingsError(f"{settings.model}: {err}") from err
        on_gpu = device.type == "cuda"
        staging_bytes = gpu_staging_bytes if on_gpu else 0
        free_bytes = (
            torch.cuda.mem_get_info(device)[0] - staging_bytes
            if on_gpu
            else psutil.virtual_memory().available // num_ranks
        )
        num_pages = pool_pages(
            layout,
            pages=settings.pool_pages,
            mib=settings.pool_mib,
            free_bytes=free_bytes,
            longest_tokens=model.config.max_model_len,
            on_gpu=on_gpu,
        )
        who = f"rank {local_rank}: " if num_ranks > 1 else ""
        rows = "" if layout.latent_format == "model" else f" with {layout.latent_format} latents"
        log.info("%s%s as %s%s on %s, %d pages", who, settings.model, model.dtype_name, rows, device, num_pages)
        return cls(device, model, LatentPool(layout, num_pages, device, staging_bytes=staging_bytes))
