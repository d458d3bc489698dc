"""What every rank process holds: device, model, pool, transfer thread, and the worker over them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvrelay.core.errors import SettingsError
from kvrelay.core.types import Counters, Incarnation
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.pool_agent import start_agent
from kvrelay.kv_transfer.values import MAX_RING_SIZE
from kvrelay.kvcache.pool import LatentPool
from kvrelay.kvcache.sizing import pool_pages
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.group import RingGroup
from kvrelay.prefill_node.handoff import WriterOpener
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.ring import Ring
from kvrelay.prefill_node.settings import PrefillSettings, RankPlace
from kvrelay.proto.tls import Tls

log = logging.getLogger(__name__)


def align_tokens(device: torch.device) -> int:
    """Return where spans of a chunk may be cut: at pages on GPUs, anywhere on CPUs."""
    return 64 if device.type == "cuda" else 1


def choose_device(settings: PrefillSettings, place: RankPlace) -> torch.device:
    """Return the device of this rank; `auto` is one GPU per rank where there are GPUs.

    Raises:
        SettingsError: several ranks of one host were given the same GPU, or there are fewer GPUs than ranks.
    """
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda" and place.ring_size > 1:
        raise SettingsError(f"device {name} cannot be that of {place.ring_size} ranks; use auto")
    index = place.local_rank if name == "cuda" else int(name.removeprefix("cuda:"))
    if index >= torch.cuda.device_count():
        raise SettingsError(f"rank {place.rank} needs cuda:{index}; there are {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(frozen=True, slots=True)
class Compute:
    """Loaded and allocated, but not connected yet."""

    device: torch.device
    model: Model
    pool: LatentPool

    @classmethod
    def load(cls, settings: PrefillSettings, place: RankPlace) -> Compute:
        """Load the model and allocate the pool.

        Raises:
            ModelLoadError, SettingsError, CapacityError: it cannot be done; the message says what was wanted.
        """
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = choose_device(settings, place)
        model = load_model(
            Path(settings.model), dtype=settings.dtype, device=device, max_model_len=settings.max_model_len or None
        )
        layout = model.layout(block_tokens=settings.block_tokens)
        num_pages = pool_pages(
            layout,
            pages=settings.pool_pages,
            mib=settings.pool_mib,
            free_bytes=_free_bytes(place, device),
            longest_tokens=model.config.max_model_len,
            on_gpu=device.type == "cuda",
        )
        log.info("rank %d: %s on %s, %d pages", place.rank, settings.model, device, num_pages)
        return cls(device, model, LatentPool(layout, num_pages, device))

    def start_transfer(
        self, settings: PrefillSettings, node: Incarnation, rank: int, *, on_fatal: Callable[[], None]
    ) -> TransferThread:
        """Start this rank's agent of the data plane.

        Raises:
            TransferError: the transport does not start.
        """
        transfer, _ = start_agent(self.pool, settings, node=node, rank=rank, num_cells=MAX_RING_SIZE, on_fatal=on_fatal)
        return transfer

    def worker(
        self,
        settings: PrefillSettings,
        group: RingGroup | None,
        transfer: TransferThread,
        node: Incarnation,
        loop: asyncio.AbstractEventLoop,
        *,
        wake: Callable[[], None],
        counters: Counters,
    ) -> RankWorker:
        """Return the worker of this rank; `wake` is called when a hand-off has moved on."""
        ring = Ring(group, self.pool, counters)
        opener = WriterOpener(
            transfer=transfer,
            pool=self.pool,
            node=node,
            rank=ring.rank,
            loop=loop,
            limits=Limits(
                fence_timeout_s=settings.fence_timeout_s,
                max_message_bytes=settings.max_message_bytes,
                tls=Tls.load(ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key),
            ),
            wake=wake,
        )
        planner = ChunkPlanner(
            rank=ring.rank,
            ring_size=ring.size,
            align_tokens=align_tokens(self.device),
            ring_block_tokens=settings.ring_block_tokens_on(self.device.type),
            device=self.device,
        )
        return RankWorker(
            self.model, self.pool, ring, open_writer=opener, planner=planner, counters=counters,
            more_counters=(transfer.counters, opener.counters), transfer_stuck_s=transfer.stuck_s,
        )  # fmt: skip


def _free_bytes(place: RankPlace, device: torch.device) -> int:
    """Return the memory that is this rank's to use; ranks on CPUs share their host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // place.ring_size
