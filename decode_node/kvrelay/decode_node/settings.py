"""Settings of a decode node."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvrelay.core.settings import NodeSettings


class DecodeSettings(NodeSettings):
    """One decode node: reserves pages for requests, takes their latents in, and generates their tokens."""

    model_config = SettingsConfigDict(env_prefix="KVRELAY_DECODE_")

    max_batch: int = Field(64, ge=1, le=4096, description="most sequences in one step; more take turns")
    local_prefill_tokens: int = Field(
        256, ge=0, description="prompt tokens that may wait here to be computed instead of handed over; 0 = none"
    )
    local_prefill_pause_ms: float = Field(
        25.0, gt=0, description="longest pause between two steps that computing them may make"
    )
    max_requests: int = Field(512, ge=1, description="most requests at once, reserved or running; more are refused")
