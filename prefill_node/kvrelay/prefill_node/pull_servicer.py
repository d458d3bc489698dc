"""What rank 0 serves to the nodes that are pulled from, and to an operator who fences one of them."""

from __future__ import annotations

from typing import Any

from grpc import aio

from kvrelay.kv_transfer.hub_servicer import HubServicer
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.step_answer import answer_of
from kvrelay.proto.v1 import decode_pb2, ring_pb2


class PullServicer(HubServicer):
    """A hub's service, but that a fence is every rank's."""

    def __init__(self, hub: ReaderHub, leader: Leader, *, ring_size: int) -> None:
        super().__init__(hub)
        self._leader = leader
        self._ring_size = ring_size

    async def FenceWriter(
        self, request: decode_pb2.FenceWriterRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.FenceWriterReply:
        # This rank at once: between two steps there may be a chunk, which takes longer than an operator waits.
        own = await super().FenceWriter(request, context)
        if self._ring_size == 1:
            return own
        fence = ring_pb2.RingFence(writer=request.writer)
        if request.HasField("alive"):
            fence.alive.CopyFrom(request.alive)
        pages = await answer_of(self._leader.call, lambda control: control.fence_writer(fence))
        return decode_pb2.FenceWriterReply(pages=pages)
