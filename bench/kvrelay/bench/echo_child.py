"""`python -m kvrelay.bench.echo_child PARENT_PID REPLY_BYTES`: a gRPC server that answers with what it got."""

from __future__ import annotations

import sys

import grpc
import uvloop
from grpc import aio

from kvrelay.core import freed_memory
from kvrelay.core.lifecycle import announce_ready, die_with_parent
from kvrelay.proto.server import server_options

METHOD = "/kvrelay.bench.Echo/Echo"


async def serve(reply_bytes: int) -> None:
    async def echo(request: bytes, _: aio.ServicerContext[bytes, bytes]) -> bytes:
        return request[:reply_bytes].ljust(reply_bytes, b"\0")

    _, service, method = METHOD.split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo)
    server = aio.server(options=server_options(64 << 20))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announce_ready(endpoint=f"127.0.0.1:{port}", name="echo")
    await server.wait_for_termination()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    freed_memory.keep()  # as the router does: what that saves is no merit of placing
    uvloop.run(serve(int(sys.argv[2])))
