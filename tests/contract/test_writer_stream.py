"""What a rank says in its Attach stream, and what of it is said again when the stream is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from kvrelay.core.clock import monotonic
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.values import FenceProof
from kvrelay.kv_transfer.writer_stream import WriterStream
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2


class Decode(decode_pb2_grpc.DecodeNodeServicer):
    """Takes note of what it hears, and ends a stream in good order when it is told to."""

    def __init__(self) -> None:
        self.said: list[str | None] = []
        self.has_read_all, self.may_end, self.told = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def Attach(self, requests: AsyncIterator[handoff_pb2.WriterEvent], context: Any) -> Any:
        yield handoff_pb2.ReaderEvent(attached=handoff_pb2.Attached())
        async for event in requests:
            self.said.append(event.WhichOneof("event"))
        self.has_read_all.set()
        await self.may_end.wait()

    async def Fenced(self, request: decode_pb2.FencedRequest, context: Any) -> decode_pb2.FencedReply:
        self.told.set()
        return decode_pb2.FencedReply()


@pytest.mark.parametrize("when", ["before its last words", "after them"])
async def test_a_fence_reaches_decode_whenever_it_comes(when: str) -> None:
    decode, server = Decode(), aio.server()  # type: ignore[abstract]  # nobody calls the rest
    decode_pb2_grpc.add_DecodeNodeServicer_to_server(decode, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stream = WriterStream(
        handoff_pb2.AttachHello(), endpoint=f"127.0.0.1:{port}", row_bytes=64, on_event=lambda _: None,
        counters=Counters(), limits=Limits(), name="test", clock=monotonic,
    )  # fmt: skip
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(stream.run(done))
    if when == "before its last words":
        stream.say_fence(FenceProof.CELL_WRITTEN)
    done.set_result(None)
    await asyncio.wait_for(decode.has_read_all.wait(), 10)
    if when == "after them":
        stream.say_fence(FenceProof.CELL_WRITTEN)

    decode.may_end.set()

    await asyncio.wait_for(running, 10)
    if when == "after them":
        await asyncio.wait_for(decode.told.wait(), 10)
    assert decode.said == ["hello", *(["fenced"] if when == "before its last words" else [])]
    assert decode.told.is_set() == (when == "after them")
    await server.stop(None)
