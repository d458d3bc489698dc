"""The gRPC edge for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from grpc import aio

from kvrelay.core.errors import InvalidRequestError, UnknownRequestError
from kvrelay.core.grpc_status import from_rpc_error, grpc_status
from kvrelay.core.types import Role
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2, decode_pb2, fleet_pb2, fleet_pb2_grpc
from kvrelay.router.decisions import Decision, DecisionLog, decision_to_pb
from kvrelay.router.fleet import ROLE_TO_PB, FleetView, NodeView, view_of
from kvrelay.router.placement import missing_for_service

_DRAIN_TIMEOUT_S = 5.0
_FENCE_TIMEOUT_S = 5.0


class Preview(Protocol):
    async def __call__(self, *, token_ids: npt.NDArray[np.int32], max_tokens: int) -> Decision:
        """Say where a prompt would go now."""
        ...


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Lists nodes, drains them, fences dead ones, and says why a request went where it went."""

    def __init__(
        self,
        fleet: FleetView,
        decisions: DecisionLog,
        preview: Preview,
        traffic: Callable[[], fleet_pb2.TrafficReply],
    ) -> None:
        self._fleet = fleet
        self._decisions = decisions
        self._preview = preview
        self._traffic = traffic

    async def ListNodes(
        self, request: fleet_pb2.ListNodesRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.ListNodesReply:
        return fleet_pb2.ListNodesReply(nodes=self._fleet.records())

    async def Traffic(
        self, request: fleet_pb2.TrafficRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.TrafficReply:
        return self._traffic()

    async def DrainNode(
        self, request: fleet_pb2.DrainNodeRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.DrainNodeReply:
        async with grpc_status(context):
            return await self._drain(request)

    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.ExplainReply:
        async with grpc_status(context):
            decision = self._decisions.find(request.request_id)
            if decision is None:
                raise UnknownRequestError(
                    f"request {request.request_id!r} is not among the {len(self._decisions)} that are remembered here"
                )
            return decision_to_pb(decision)

    async def Preview(
        self, request: fleet_pb2.PreviewRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.ExplainReply:
        async with grpc_status(context):
            ids_T = convert.view_ids(request.packed_ids)
            if not len(ids_T) or not request.max_tokens:
                raise InvalidRequestError(f"{len(ids_T)} prompt tokens and max_tokens {request.max_tokens}: no request")
            return decision_to_pb(await self._preview(token_ids=ids_T, max_tokens=request.max_tokens))

    async def FenceNode(
        self, request: fleet_pb2.FenceNodeRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.FenceNodeReply:
        async with grpc_status(context):
            return await self._fence(request)

    async def _fence(self, request: fleet_pb2.FenceNodeRequest) -> fleet_pb2.FenceNodeReply:
        """Tell every node that others write into, draining ones too: decode nodes, and prefill nodes that pull.

        Raises:
            InvalidRequestError: there is no name, nobody knows it, or the life that is meant is registered.
        """
        if not request.name:
            raise InvalidRequestError("the name of the node to fence is empty")
        records = self._fleet.records()
        alive = next((one.node for one in records if one.node.name == request.name), None)
        if alive is not None and alive.start_id == request.start_id:
            raise InvalidRequestError(f"this life of {request.name} is registered: it is alive; drain it")
        asked = decode_pb2.FenceWriterRequest(
            writer=common_pb2.Incarnation(name=request.name, start_id=request.start_id), alive=alive
        )
        nodes = [one for one in map(view_of, records) if one is not None and (one.role is Role.DECODE or one.pulls)]
        calls = (self._fleet.decode(node).FenceWriter(asked, timeout=_FENCE_TIMEOUT_S) for node in nodes)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        reply = fleet_pb2.FenceNodeReply()
        for node, answer in zip(nodes, replies, strict=True):
            if isinstance(answer, aio.AioRpcError):
                reply.unreached.append(node.incarnation.name)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                reply.told.append(node.incarnation.name)
                reply.pages += answer.pages
        is_known = alive is not None or self._fleet.has_left(request.name) or reply.pages
        if not is_known and not reply.unreached and self._fleet.registry_reachable:
            raise InvalidRequestError(
                f"no node has the name {request.name!r}, none that left since this router started had it, and no node "
                f"keeps pages from it; known: {self._known()}"
            )
        return reply

    def _known(self) -> str:
        return ", ".join(sorted(record.node.name for record in self._fleet.records())) or "none"

    async def _drain(self, request: fleet_pb2.DrainNodeRequest) -> fleet_pb2.DrainNodeReply:
        """Tell the node to drain; return how many requests it has, and what the fleet lacks without it.

        Raises:
            InvalidRequestError: there is no such node or role, or it has that role already.
            ServeError: it cannot be reached, or refuses.
        """
        name, node = request.name, self._fleet.find(request.name)
        if node is None:
            raise InvalidRequestError(f"no node has the name {name!r}; known: {self._known()}")
        roles = list(ROLE_TO_PB.values())
        if request.next_role and request.next_role not in roles:
            raise InvalidRequestError(f"next_role is {request.next_role}; it must be one of {roles}")
        if request.next_role == ROLE_TO_PB[node.role]:
            draining = "; it is draining, to leave or to take the other role" if node.draining else ""
            raise InvalidRequestError(f"{name} is a {node.role.value} node already{draining}")
        stub = self._fleet.prefill(node) if node.role is Role.PREFILL else self._fleet.decode(node)
        try:
            reply = await stub.Drain(
                common_pb2.DrainRequest(switch_role=bool(request.next_role)), timeout=_DRAIN_TIMEOUT_S
            )
        except aio.AioRpcError as err:
            raise from_rpc_error(err, peer=name) from err
        if not request.next_role:  # a node that changes its role says so itself, when it is sure that it can
            self._fleet.mark_draining(node.incarnation)
        return fleet_pb2.DrainNodeReply(
            active_requests=reply.active_requests, missing=self._missing_without(node, switches=bool(request.next_role))
        )

    def _missing_without(self, node: NodeView, *, switches: bool) -> str:
        """Return what the fleet lacks to serve anything once a node has left or switched roles; empty = nothing."""
        stay = [other for other in self._fleet.nodes() if other.incarnation != node.incarnation]
        if switches:
            [other_role] = set(Role) - {node.role}
            stay.append(replace(node, role=other_role))
        return missing_for_service(stay) or ""
