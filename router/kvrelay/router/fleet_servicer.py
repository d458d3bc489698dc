"""The gRPC edge for operators."""

from __future__ import annotations

from typing import Any

from grpc import aio

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.grpc_status import from_rpc_error, grpc_status
from kvrelay.core.types import Role
from kvrelay.proto.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc
from kvrelay.router.fleet import FleetView

_DRAIN_TIMEOUT_S = 5.0


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Lists nodes and drains them."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet

    async def ListNodes(
        self, request: fleet_pb2.ListNodesRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.ListNodesReply:
        return fleet_pb2.ListNodesReply(nodes=self._fleet.records())

    async def DrainNode(
        self, request: fleet_pb2.DrainNodeRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.DrainNodeReply:
        async with grpc_status(context):
            return fleet_pb2.DrainNodeReply(active_requests=await self._drain(request.name))

    async def _drain(self, name: str) -> int:
        node = self._fleet.find(name)
        if node is None:
            known = ", ".join(sorted(record.node.name for record in self._fleet.records())) or "none"
            raise InvalidRequestError(f"no node has the name {name!r}; known: {known}")
        self._fleet.mark_draining(node.incarnation)
        stub = self._fleet.prefill(node) if node.role is Role.PREFILL else self._fleet.decode(node)
        try:
            reply = await stub.Drain(common_pb2.DrainRequest(), timeout=_DRAIN_TIMEOUT_S)
        except aio.AioRpcError as err:
            raise from_rpc_error(err, peer=name) from err
        return reply.active_requests
