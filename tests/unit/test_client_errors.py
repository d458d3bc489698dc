"""What the command line says when a call fails."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import pytest
from grpc import aio

from kvrelay.cli.client import error_of
from kvrelay.core.errors import UnavailableError
from kvrelay.core.grpc_status import grpc_status
from kvrelay.proto.v1 import inference_pb2, inference_pb2_grpc


def test_a_router_that_is_not_there_is_told_with_what_to_do() -> None:
    with socket.socket() as taken:  # bound and not listening: a port that refuses
        taken.bind(("127.0.0.1", 0))
        with grpc.insecure_channel(f"127.0.0.1:{taken.getsockname()[1]}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as failed:
                list(stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=10))

    status, text = error_of(failed.value)

    assert status == "UNAVAILABLE"
    assert "kvrelay up" in text


async def test_a_router_that_says_of_a_node_that_it_refuses_is_quoted_as_it_is() -> None:
    async def answer(request: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
        async with grpc_status(context):
            raise UnavailableError("decode-0@1: Connection refused")

    server = aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Router", {"Ask": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/Router/Ask")
            with pytest.raises(aio.AioRpcError) as failed:
                await ask(b"", timeout=10)
    finally:
        await server.stop(None)

    assert error_of(failed.value) == ("UNAVAILABLE", "decode-0@1: Connection refused")
