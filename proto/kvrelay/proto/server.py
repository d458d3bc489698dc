"""What every gRPC server and channel of kvrelay has in common: limits, keepalive, health, reflection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.core.errors import SettingsError
from kvrelay.proto.gate import Check, Gate, members_only
from kvrelay.proto.handshakes import Handshakes
from kvrelay.proto.tls import CHANNEL_OPTIONS, Tls

# A peer whose machine is gone is noticed within about 15 s, one whose kernel still answers for it within about 20 s.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),  # for the kernel's own answer
    ("grpc.http2.ping_timeout_ms", 10_000),  # for the process's; a minute if not said
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return options for a client channel to one of our servers."""
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A restarted peer must be found in well under a second, not after gRPC's default minute of backoff.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # gRPC also uses this as its connect timeout: a busy peer needs longer than the first pause.
        ("grpc.min_reconnect_backoff_ms", 1_500),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent share
    ]


class Security(TypedDict, total=False):
    """Arguments of `serve` that say who may call."""

    interceptors: tuple[aio.ServerInterceptor, ...]
    credentials: grpc.ServerCredentials


def node_security(tls: Tls | None, on_refused: Callable[[str], None]) -> Security:
    """Return what lets only members of the fleet call a node; without `tls`, anybody in plain text."""
    if tls is None:
        return {}
    return tls_security(tls, members_only, on_refused=on_refused)


def tls_security(
    tls: Tls, check: Check, *, on_refused: Callable[[str], None], require_client_cert: bool = True
) -> Security:
    """Return what lets in, over TLS, whom `check` lets in. To be called on the event loop.

    Args:
        on_refused: told one word for each refusal: the check's, or `handshake`.
    """
    handshakes = Handshakes(lambda: on_refused("handshake"))
    return {
        "interceptors": (Gate(check, on_refused=on_refused, handshakes=handshakes),),
        "credentials": tls.server_credentials(require_client_cert=require_client_cert, on_handshake=handshakes.begun),
    }


@dataclass(slots=True)
class Server:
    """A started gRPC server with its health service. Created by `serve`."""

    grpc_server: aio.Server
    health: health.aio.HealthServicer
    endpoint: str  # host:port actually bound
    services: tuple[str, ...]

    async def set_serving(self, serving: bool) -> None:
        """Set the health of the server as a whole and of each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.services):
            await self.health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(False)
        await self.grpc_server.stop(grace_s)


async def serve(
    *,
    listen: str,
    add_services: Callable[[aio.Server], None],
    services: Sequence[ServiceDescriptor],
    max_message_bytes: int,
    interceptors: Sequence[aio.ServerInterceptor] = (),
    credentials: grpc.ServerCredentials | None = None,
) -> Server:
    """Start a server on `listen` (host:port, port 0 = any free one); health starts NOT_SERVING.

    Raises:
        SettingsError: the address cannot be bound.
    """
    server = aio.server(options=server_options(max_message_bytes), interceptors=tuple(interceptors))
    add_services(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = tuple(service.full_name for service in services)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    host = listen.rsplit(":", 1)[0]
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as err:
        raise SettingsError(f"cannot listen on {listen}: the address is in use or not ours") from err
    await server.start()
    started = Server(server, health_servicer, f"{host}:{port}", names)
    await started.set_serving(False)
    return started


def connect(endpoint: str, *, max_message_bytes: int, tls: Tls | None = None) -> aio.Channel:
    """Return a channel to one of our servers, in plain text without `tls`; connects lazily."""
    options = channel_options(max_message_bytes)
    if tls is None:
        return aio.insecure_channel(endpoint, options=options)
    return aio.secure_channel(endpoint, tls.channel_credentials(), options=[*options, *CHANNEL_OPTIONS])


def connect_blocking(endpoint: str, *, max_message_bytes: int, tls: Tls | None = None) -> grpc.Channel:
    """The same for threads without an event loop."""
    options = channel_options(max_message_bytes)
    if tls is None:
        return grpc.insecure_channel(endpoint, options=options)
    return grpc.secure_channel(endpoint, tls.channel_credentials(), options=[*options, *CHANNEL_OPTIONS])
