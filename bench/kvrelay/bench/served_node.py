"""A mixed node as its users reach it: over gRPC, by the project's own Generate.

Nothing stands between a request and the thread that computes: no placement, no checks, no text. So it is the fastest
single node that a client could have.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop
from grpc import aio

from kvrelay.core import pace
from kvrelay.proto import convert, server
from kvrelay.proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_MESSAGE_BYTES = 64 << 20
Tell = Callable[[int], object]  # of a token, as soon as it is there


@dataclass(frozen=True, slots=True)
class Call:
    """One request that came."""

    prompt: npt.NDArray[np.int64]
    num_tokens: int
    tell: Tell  # from any thread


class Door:
    """Where requests come in; who owns it answers them, each once it is `next`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._open: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()  # where, and how to close
        self._turns = pace.serving()  # as in a process that serves, for as long as this one lives

    def open(self) -> str:
        """Serve from a thread of its own; return where. Once."""
        self._turns.__enter__()
        thread = threading.Thread(target=uvloop.run, args=(self._serve(),), name="served", daemon=True)
        thread.start()
        endpoint, close = self._open.get()
        atexit.register(thread.join)  # behind the next one: a loop that still ran would end the process badly
        atexit.register(close)
        pace.settle()
        return endpoint

    def next(self) -> Call:
        """Wait for a request."""
        return self._calls.get()

    async def _serve(self) -> None:
        def add(grpc_server: aio.Server) -> None:
            servicer = _Servicer(self._calls.put)  # type: ignore[abstract]
            inference_pb2_grpc.add_InferenceServicer_to_server(servicer, grpc_server)

        started = await server.serve(
            listen="127.0.0.1:0", add_services=add, services=(), max_message_bytes=_MESSAGE_BYTES
        )
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        self._open.put((started.endpoint, lambda: loop.call_soon_threadsafe(over.set)))
        await over.wait()
        await started.stop(0)


class _Servicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, take: Callable[[Call], object]) -> None:
        self._take = take

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[int]()
        prompt = convert.view_ids(request.tokens.packed_ids).astype(np.int64)
        num_tokens = request.sampling.max_tokens
        self._take(Call(prompt, num_tokens, lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token)))
        for _ in range(num_tokens):
            token = await tokens.get()
            yield inference_pb2.GenerateEvent(tokens=inference_pb2.Tokens(token_ids=[token]))
        finished = inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH)
        yield inference_pb2.GenerateEvent(finished=finished)
