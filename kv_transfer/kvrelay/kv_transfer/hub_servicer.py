"""What a node serves to those that write into its pages, whoever they are: the gRPC side of a `ReaderHub`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from kvrelay.core.grpc_status import grpc_status
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.proto import convert
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2


class HubServicer(decode_pb2_grpc.DecodeNodeServicer):
    """Attach, Fenced and FenceWriter of DecodeNode. A node that also decodes adds the rest; otherwise, as on a prefill
    node that pulls, the rest is UNIMPLEMENTED.
    """

    def __init__(self, hub: ReaderHub) -> None:
        self._hub = hub

    async def Attach(
        self, request_iterator: AsyncIterator[handoff_pb2.WriterEvent], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[handoff_pb2.ReaderEvent]:
        async for event in self._hub.attach(request_iterator, context):
            yield event

    async def Fenced(
        self, request: decode_pb2.FencedRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.FencedReply:
        async with grpc_status(context):
            self._hub.fenced(request)
        return decode_pb2.FencedReply()

    async def FenceWriter(
        self, request: decode_pb2.FenceWriterRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.FenceWriterReply:
        alive = convert.incarnation_from_pb(request.alive) if request.HasField("alive") else None
        writer = request.writer
        pages = self._hub.fence(writer.name, start_id=writer.start_id, alive=alive, why="fenced by an operator")
        return decode_pb2.FenceWriterReply(pages=pages)


def add_to_server(hub: ReaderHub, server: aio.Server) -> None:
    """Serve the hand-offs of a node that is no decode node."""
    decode_pb2_grpc.add_DecodeNodeServicer_to_server(HubServicer(hub), server)  # type: ignore[abstract]
