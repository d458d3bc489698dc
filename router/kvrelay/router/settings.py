"""Settings of the router."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvrelay.core.settings import CommonSettings


class RouterSettings(CommonSettings):
    """Takes requests from clients and places each on a prefill and a decode node."""

    model_config = SettingsConfigDict(env_prefix="KVRELAY_ROUTER_")

    model: str = Field(description="checkpoint folder; only its small JSON files are read")
    served_name: str = Field("", description="name clients may ask for; empty = the folder's name")
    max_model_len: int = Field(0, ge=0, description="longest prompt plus output; 0 = what the nodes report")
    long_prompt_tokens: int = Field(1024, ge=1, description="remaining tokens from which the largest ring is used")
    max_retries: int = Field(2, ge=0, le=10, description="more attempts after a failure that another node may not have")
    registry_refresh_s: float = Field(0.5, gt=0, description="how often the list of nodes is read")
    put_aside_s: float = Field(3.0, ge=0, description="no placement on a node this long after a call to it failed")
