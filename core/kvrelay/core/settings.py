"""Settings that all roles share, and the rule that an unknown KVRELAY_ variable is an error.

Each role derives its own class with its own `env_prefix`; every field is at once a command line option
(`--max-request-s`) and an environment variable (`KVRELAY_<ROLE>_MAX_REQUEST_S`). Nothing else reads the environment.
"""

from __future__ import annotations

import os
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

from kvrelay.core.address import is_address
from kvrelay.core.clock import MAX_TIME_LIMIT_S
from kvrelay.core.errors import SettingsError
from kvrelay.core.logs import LogFormat
from kvrelay.core.wrong_setting import Source, describe

LogLevel = Literal["debug", "info", "warning", "error"]
S = TypeVar("S", bound="CommonSettings")
N = TypeVar("N", bound="NodeSettings")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LatentFormat = Literal["model", "fp8"]


class CommonSettings(BaseSettings):
    """Fields of every long-running process."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        env_nested_delimiter="__",
        protected_namespaces=(),
    )

    fleet: str = Field(
        "default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="fleet name; keys in the index carry it"
    )
    name: str = Field("", description="stable over restarts; {host} = host name; empty = role-host-random")
    listen: str = Field("127.0.0.1:0", description="host:port to serve gRPC on; port 0 = any free")
    advertise: str = Field("", description="host:port told to the others; empty = the bound or this host's address")
    index_url: str = Field("redis://127.0.0.1:6379/0", description="Redis-protocol server of the index and registry")
    log_level: LogLevel = Field("info", description="debug, info, warning or error")
    log_format: LogFormat = Field("text", description="text, or json: one object per line, with the request's id")
    trace_exporter: str = Field(
        "", description="OpenTelemetry span exporter, e.g. otlp_proto_grpc; needs the extra otel; empty = none"
    )
    metrics_listen: str = Field("", description="host:port of the Prometheus endpoint; empty = none, port 0 = any free")
    max_message_mib: int = Field(32, ge=1, le=1024, description="largest gRPC message in MiB; 4 bytes per prompt token")
    tls_ca: str = Field("", description="PEM file of the fleet's CA; set = mutual TLS everywhere, empty = plain text")
    tls_cert: str = Field("", description="PEM file of this process's certificate")
    tls_key: str = Field("", description="PEM file of its key")
    max_request_s: float = Field(
        600.0, gt=0, le=MAX_TIME_LIMIT_S, description="time limit of a request whose client sets none"
    )
    lease_s: float = Field(
        5.0, ge=0.5, le=MAX_TIME_LIMIT_S, description="a session whose holder is silent this long is aborted"
    )
    stuck_after_s: float = Field(
        10.0, gt=0, description="a process one of whose threads makes no progress for this long is not serving"
    )
    lame_duck_s: float = Field(
        1.0, ge=0, description="when asked to stop: time between saying so to the others and refusing new work"
    )

    @field_validator("listen", "advertise", "metrics_listen")
    @classmethod
    def _is_an_address(cls, text: str, info: ValidationInfo) -> str:
        if not is_address(text) and (text or info.field_name == "listen"):
            raise ValueError("host:port")
        return text

    @property
    def max_message_bytes(self) -> int:
        return self.max_message_mib << 20


class NodeSettings(CommonSettings):
    """Fields of prefill and decode nodes."""

    model: str = Field(description="checkpoint folder in the Hugging Face layout")
    dtype: Dtype = Field("auto", description="auto = float32 on CPUs, the checkpoint's on GPUs")
    latent_format: LatentFormat = Field(
        "model", description="numbers of latent rows, one for the whole fleet: model = dtype, fp8 = e4m3 with scales"
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu or cuda:N")
    max_model_len: int = Field(0, ge=0, description="longest prompt plus output; 0 = the checkpoint's limit")
    block_tokens: int = Field(64, ge=64, multiple_of=64, description="tokens per block of the prefix index")
    pool_pages: int = Field(0, ge=0, description="latent pages of 64 tokens per rank; 0 = by pool_mib")
    pool_mib: int = Field(0, ge=0, description="MiB of latent pages per rank; 0 = by free memory")
    threads: int = Field(0, ge=0, description="intra-op threads per process; 0 = torch's choice")
    transport: Literal["nixl"] = Field("nixl", description="data plane")
    net_devices: str = Field(
        "", description="network devices of the data plane (UCX_NET_DEVICES); empty = UCX's choice"
    )
    tcp_port_range: str = Field(
        "", description="ports of the data plane (UCX_TCP_PORT_RANGE), for firewalls; empty = any"
    )
    expected_transports: str = Field(
        "",
        pattern=r"^([a-z0-9_]+(,[a-z0-9_]+)*)?$",
        description="UCX transports that relays should use, e.g. rc,cuda_ipc, else it is warned; empty = any but tcp",
    )
    direct_writes: bool = Field(
        True, description="write scattered pages straight into GPU pools of other processes of this host"
    )
    heartbeat_s: float = Field(
        2.0, gt=0, description="time between registry heartbeats (prefill with a queue: a fifth); a record lives three"
    )
    fence_timeout_s: float = Field(10.0, gt=0, description="pages whose fence is later than this are quarantined")

    @model_validator(mode="after")
    def _pool_is_given_once(self) -> Self:
        if self.pool_pages and self.pool_mib:
            raise ValueError(f"pool_pages={self.pool_pages} and pool_mib={self.pool_mib} are both set; give one")
        return self


def load(cls: type[S], argv: list[str], *, prog: str, environ: Mapping[str, str] | None = None) -> S:
    """Return the settings of one role from its command line and the environment.

    `--help` prints the options and exits with status 0, as argparse does.

    Raises:
        SettingsError: an option or variable is unknown, missing or wrong; the text names it and the limit.
    """
    environ = os.environ if environ is None else environ
    _refuse_unknown_variables(cls, environ)
    parser = _Parser(
        prog=prog, description=cls.__doc__, formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(cls, root_parser=parser, cli_prog_name=prog)
        return CliApp.run(cls, cli_args=argv, cli_settings_source=source)
    except ValidationError as err:
        raise SettingsError(f"{prog}: {describe(err, cls.model_fields, Source(_prefix(cls), environ, argv))}") from err


def in_other_role(cls: type[N], settings: NodeSettings, **fixed: Any) -> N:
    """Return the settings that a node has when its process takes another role.

    What all nodes have is as in `settings`; the rest is `fixed`, or by the other role's variables and defaults.

    Raises:
        SettingsError: a variable of the other role is wrong.
    """
    common = {name: getattr(settings, name) for name in NodeSettings.model_fields}
    try:
        return cls(**common | fixed)
    except ValidationError as err:
        raise SettingsError(describe(err, cls.model_fields, Source(_prefix(cls), os.environ))) from err


def _prefix(cls: type[CommonSettings]) -> str:
    return cls.model_config.get("env_prefix", "")


class _Parser(ArgumentParser):
    """Reports a wrong command line as a SettingsError instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message}")


def _refuse_unknown_variables(cls: type[CommonSettings], environ: Mapping[str, str]) -> None:
    # pydantic-settings ignores an unknown top-level variable, so a misspelt one would silently do nothing.
    prefix = _prefix(cls)
    known = {prefix + name.upper() for name in cls.model_fields}
    for name in environ:
        if name.startswith(prefix) and name.split("__", 1)[0] not in known:
            raise SettingsError(f"environment variable {name} names no setting; known: {', '.join(sorted(known))}")
