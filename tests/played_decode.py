"""What decode nodes that play a script have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2


class WithoutHandoffs(decode_pb2_grpc.DecodeNodeServicer):
    """Takes what writers and operators say, and does nothing about it."""

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[handoff_pb2.ReaderEvent]:
        yield handoff_pb2.ReaderEvent()

    async def Fenced(self, request: Any, context: Any) -> decode_pb2.FencedReply:
        return decode_pb2.FencedReply()

    async def FenceWriter(self, request: Any, context: Any) -> decode_pb2.FenceWriterReply:
        return decode_pb2.FenceWriterReply()
