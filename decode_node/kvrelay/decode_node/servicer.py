"""The DecodeNode service: translate, delegate, translate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

from grpc import aio

from kvrelay.core import tracing
from kvrelay.core.drain import OnDrain
from kvrelay.core.errors import ServeError
from kvrelay.core.grpc_status import grpc_status
from kvrelay.core.types import SampledToken
from kvrelay.decode_node.node import DecodeNode
from kvrelay.decode_node.requests import Admitted, Ask, Done, Event, First, Record
from kvrelay.kv_transfer.hub_servicer import HubServicer
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.kv_transfer.wire import request_from_pb
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2, decode_pb2


class DecodeServicer(HubServicer):
    """The whole service; what writers call is the hub's part."""

    def __init__(
        self,
        node: DecodeNode,
        hub: ReaderHub,
        *,
        lease_s: float,
        max_request_s: float,
        drain: OnDrain,
        stats: Callable[[], common_pb2.NodeStats],
    ) -> None:
        super().__init__(hub)
        self._node = node
        self._lease_s = lease_s
        self._max_request_s = max_request_s
        self._drain = drain
        self._stats = stats

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveReply:
        async with grpc_status(context):
            convert.check_request_id(request.request.request_id)
            with _span("reserve", request.request, context):
                ticket, computes = await self._node.reserve(_ask(request, self._max_request_s))
                return decode_pb2.ReserveReply(ticket=ticket, computes=computes)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        async with grpc_status(context):
            record = self._node.open_stream(request_from_pb(request.request), convert.epoch_from_pb(request.epoch))
            try:
                with _span("decode", request.request, context):
                    async for event in _events(record):
                        yield event
            finally:
                self._node.close_stream(record)

    async def Abort(
        self, request: common_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.AbortReply:
        async with grpc_status(context):
            convert.check_request_id(request.request.request_id)
        return common_pb2.AbortReply(was_active=self._node.abort(request_from_pb(request.request), request.reason))

    async def Renew(
        self, request: common_pb2.RenewRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.RenewReply:
        unknown = self._node.renew(convert.incarnation_from_pb(request.holder), request.request_ids)
        return common_pb2.RenewReply(unknown_request_ids=unknown, lease_ms=convert.ms_to_pb(self._lease_s))

    async def Drain(
        self, request: common_pb2.DrainRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.DrainReply:
        active = self._node.records.num_active
        async with grpc_status(context):
            self._drain(switch_role=request.switch_role)
        return common_pb2.DrainReply(active_requests=active)

    async def Stats(
        self, request: common_pb2.StatsRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.NodeStats:
        return self._stats()


def _span(
    name: str, request: common_pb2.RequestRef, context: aio.ServicerContext[Any, Any]
) -> AbstractContextManager[tracing.Trace]:
    parent = tracing.incoming(context.invocation_metadata())
    return tracing.span(name, of=request.request_id, parent=parent)


def _ask(message: decode_pb2.ReserveRequest, max_request_s: float) -> Ask:
    return Ask(
        request=request_from_pb(message.request),
        node=convert.incarnation_from_pb(message.node),
        holder=convert.incarnation_from_pb(message.holder),
        writer=convert.incarnation_from_pb(message.writer),
        ring_size=message.ring_size,
        prompt_T=convert.unpack_ids(message.packed_ids),
        num_sent_tokens=message.num_sent_tokens,
        sampling=convert.sampling_from_pb(message.sampling),
        fingerprint=message.layout_fingerprint,
        prefix_seed=message.prefix_seed,
        timeout_s=message.timeout_ms / 1000 if message.timeout_ms else max_request_s,
        may_compute=message.may_compute,
    )


async def _events(record: Record) -> AsyncIterator[decode_pb2.DecodeEvent]:
    """Yield what happens to a request up to its end; tokens that wait are sent together.

    Raises:
        ServeError: the request failed.
    """
    queue = record.events
    while True:
        event: Event | None = await queue.get()
        tokens: list[SampledToken] = []
        while isinstance(event, SampledToken):
            tokens.append(event)
            event = None if queue.empty() else queue.get_nowait()
        if tokens:
            sampled = decode_pb2.DecodeTokens(tokens=map(convert.sampled_to_pb, tokens))
            yield decode_pb2.DecodeEvent(tokens=sampled)
        if isinstance(event, Admitted):
            yield decode_pb2.DecodeEvent(admitted=_admitted(event))
        elif isinstance(event, First):
            first = decode_pb2.DecodeFirst(
                token=convert.sampled_to_pb(event.token),
                prefill_ms=event.prefill_s * 1000,
                computed_tokens=event.computed_tokens,
            )
            yield decode_pb2.DecodeEvent(first=first)
        elif isinstance(event, Done):
            done = decode_pb2.DecodeDone(
                reason=convert.finish_to_pb(event.reason),
                step_ms=event.step_s * 1000,
                num_tokens=event.num_tokens,
                first_step_ms=event.first_step_s * 1000,
            )
            yield decode_pb2.DecodeEvent(done=done)
            return
        elif isinstance(event, ServeError):
            raise event


def _admitted(event: Admitted) -> decode_pb2.DecodeAdmitted:
    handoff = event.handoff
    if handoff is None:
        return decode_pb2.DecodeAdmitted(resident_tokens=event.resident_tokens)
    return decode_pb2.DecodeAdmitted(
        resident_tokens=event.resident_tokens,
        exposed_relay_ms=handoff.exposed_relay_ms,
        verify_ms=handoff.verify_ms,
        admit_ms=event.admit_s * 1000,
        relayed_bytes=handoff.relayed_bytes,
        early_bytes=handoff.early_bytes,
    )
