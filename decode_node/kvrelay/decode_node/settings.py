"""Settings of a decode node."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from kvrelay.core.settings import NodeSettings

_TEST_FLEET = "test-"


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
    step_floor_ms: float = Field(
        0.0, ge=0, description="tests only, in fleets named test-...: a step takes at least this long"
    )

    @model_validator(mode="after")
    def _only_tests_are_slowed_down(self) -> Self:
        if self.step_floor_ms and not self.fleet.startswith(_TEST_FLEET):
            raise ValueError(f"step_floor_ms is for tests: it needs a fleet named {_TEST_FLEET}..., not {self.fleet!r}")
        return self
