"""Settings of a prefill node, and this process's place in its ring."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvrelay.core.errors import SettingsError
from kvrelay.core.settings import NodeSettings

# On one H200 with DeepSeek-V2-Lite's shape and FlashAttention-4, 128K tokens take 2% longer in chunks of 32K than in
# one (with cuDNN: as long). But in one a layer takes four times as long, for which a prompt that comes meanwhile waits,
# and the temporaries of a chunk are 3 GiB more, which smaller devices have no room for beside their pools.
_CPU_CHUNK_TOKENS, _GPU_CHUNK_TOKENS = 1024, 32_768
_CPU_BLOCK_TOKENS, _GPU_BLOCK_TOKENS = 4096, 131_072


class PrefillSettings(NodeSettings):
    """One prefill node: a ring of rank processes that computes prompts and relays their latents to decode nodes."""

    model_config = SettingsConfigDict(env_prefix="KVRELAY_PREFILL_")

    ring_size: int = Field(1, ge=1, le=64, description="rank processes that share each prompt, one device each")
    chunk_tokens: int = Field(
        0, ge=0, description="prompt tokens per step; 0 = 1024 on CPUs, 32768 on GPUs (there: multiples of 2R x 64)"
    )
    ring_block_tokens: int = Field(
        0,
        ge=0,
        description="most rows per rank of one rotating block of earlier tokens; 0 = 4096 on CPUs, 131072 on GPUs",
    )
    pull_timeout_s: float = Field(
        10.0, ge=0, description="longest time to fetch cached tokens from another node before computing them; 0 = never"
    )
    host_cache_gib: float = Field(
        0.0,
        ge=0,
        description="GiB of host memory per rank for cached blocks that leave the pool (locked on a GPU); 0 = none",
    )
    group_timeout_s: float = Field(
        10.0, gt=2.5, description="a ring whose rank is silent this long leaves as a whole; ticks come every 2 s"
    )
    start_timeout_s: float = Field(600.0, gt=0, description="time for all ranks to load the model")
    max_queued_requests: int = Field(256, ge=1, description="requests that wait or run; more are refused")
    give_way_ms: float = Field(
        20.0,
        ge=0,
        description="a chunk pauses between layers for a prompt with much less to compute that would else wait this"
        " long; 0 = never",
    )
    prefix_wait_s: float = Field(
        60.0, ge=0, description="longest wait for a prefix that another request is computing here"
    )

    def chunk_tokens_on(self, device_type: str) -> int:
        """Return tokens per chunk; on GPUs a multiple of 2R x 64, so that no page is split between ranks."""
        if device_type == "cpu":
            return self.chunk_tokens or _CPU_CHUNK_TOKENS
        unit = 2 * self.ring_size * 64
        return max((self.chunk_tokens or _GPU_CHUNK_TOKENS) // unit, 1) * unit

    def ring_block_tokens_on(self, device_type: str) -> int:
        """Return rows per rank of one rotating block; it bounds memory, and each block costs a merge."""
        return self.ring_block_tokens or (_CPU_BLOCK_TOKENS if device_type == "cpu" else _GPU_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank this process is, and how it finds the others."""

    rank: int
    ring_size: int
    spawns: bool  # this process starts the other ranks itself
    local_rank: int = 0  # index of its device on this host


def rank_place(settings: PrefillSettings, environ: Mapping[str, str] | None = None) -> RankPlace:
    """Return this process's place: from torchrun's variables when they are set, else rank 0 of its own ring.

    Raises:
        SettingsError: torchrun started another number of processes than --ring-size says.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return RankPlace(0, settings.ring_size, spawns=settings.ring_size > 1)
    world_size = int(env["WORLD_SIZE"])
    if world_size != settings.ring_size:
        raise SettingsError(f"WORLD_SIZE is {world_size} but --ring-size is {settings.ring_size}; they must be equal")
    rank = int(env["RANK"])
    return RankPlace(rank, world_size, spawns=False, local_rank=int(env.get("LOCAL_RANK", rank)))


def child_environment(*, rank: int, ring_size: int, store_port: int) -> dict[str, str]:
    """Return the environment of a rank process that this one starts: torchrun's variables on this host."""
    ours = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ring_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 already serves the store
    }
    return os.environ | ours
