"""Settings of the router."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
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
    max_waiting: int = Field(1024, ge=1, description="requests whose prompt is not computed yet; more are refused")
    registry_refresh_s: float = Field(0.5, gt=0, description="how often the list of nodes is read")
    ahead_per_node: int = Field(
        4,
        ge=1,
        description="with more than one tenant: requests that a prefill node has to compute; more wait their turn",
    )
    mirror_blocks: int = Field(
        1 << 19, ge=1, description="blocks of the prefix index that the router keeps a copy of; about 200 B each"
    )
    drain_s: float = Field(60.0, gt=0, description="time that running requests get when the router is asked to stop")
    token_file: str = Field(
        "", description="JSON file of clients' tokens; set = each call needs one (with TLS); see docs/operations.md"
    )
    require_client_cert: bool = Field(True, description="with TLS, clients too must show a certificate of the CA")
    put_aside_s: float = Field(3.0, ge=0, description="no placement on a node this long after a call to it failed")

    @model_validator(mode="after")
    def _tokens_are_not_sent_in_the_open(self) -> Self:
        if self.token_file and not self.tls_ca:
            raise ValueError("token_file needs tls_ca: without TLS tokens travel in plain text")
        if self.tls_ca and not self.require_client_cert and not self.token_file:
            raise ValueError("require_client_cert is off and there is no token_file: anybody could call")
        return self
