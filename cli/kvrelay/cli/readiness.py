"""When a cluster may be called ready: its router is healthy and knows every node that was started."""

from __future__ import annotations

import asyncio

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import UnavailableError
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import fleet_pb2, fleet_pb2_grpc

TIMEOUT_S = 30.0
_PAUSE_S = 0.05
_MESSAGE_BYTES = 1 << 20


async def wait_until_serving(endpoint: str, nodes: set[str]) -> None:
    """Return when a request to the router would succeed and all `nodes` are in its fleet.

    Raises:
        UnavailableError: not within TIMEOUT_S; the text says what is missing.
    """
    until = Deadline.after(TIMEOUT_S)
    async with connect(_reachable(endpoint), max_message_bytes=_MESSAGE_BYTES) as channel:
        while True:
            missing = await _missing(channel, nodes)
            if missing is None:
                return
            if until.passed():
                raise UnavailableError(f"the cluster is not ready after {TIMEOUT_S:.0f} s: {missing}")
            await asyncio.sleep(_PAUSE_S)


def _reachable(endpoint: str) -> str:
    """Return an address to connect to for one to listen on."""
    host, _, port = endpoint.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "*") else endpoint  # noqa: S104 - compared, not bound


async def _missing(channel: aio.Channel, nodes: set[str]) -> str | None:
    try:
        listed = await fleet_pb2_grpc.FleetStub(channel).ListNodes(fleet_pb2.ListNodesRequest(), timeout=2.0)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
    except aio.AioRpcError as err:
        return f"router: {err.details()}"
    unknown = nodes - {record.node.name for record in listed.nodes}
    if unknown:
        return f"the router does not know {', '.join(sorted(unknown))}"
    return None if health.status == health_pb2.HealthCheckResponse.SERVING else "router: not serving"
