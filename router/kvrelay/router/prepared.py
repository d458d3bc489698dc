"""A Prefill call that is open before there is a prompt for it: then the prompt finds its call set up.

That is half of the time that a small prompt takes to the next process. Each such call is for one request, and ends
as any call does: by a status, a cancellation, or when the connection breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from grpc import aio

from kvrelay.core import tracing
from kvrelay.core.clock import Deadline
from kvrelay.proto import convert
from kvrelay.proto.v1 import prefill_pb2, prefill_pb2_grpc

PrefillCall = aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]
OpenCall = aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]


class Prepared:
    """The open call to one node; at most one waits."""

    def __init__(self, stub: prefill_pb2_grpc.PrefillNodeAsyncStub) -> None:
        self._stub = stub
        self._call: OpenCall | None = None

    def prepare(self) -> None:
        """Open a call, unless one waits."""
        if self._call is None or self._call.done():
            self._call = self._stub.PreparedPrefill()

    def take(self) -> OpenCall | None:
        """Return the call that waits, for one request; None when there is none, or the node has ended it."""
        call, self._call = self._call, None
        return None if call is None or call.done() else call

    def close(self) -> None:
        if (call := self.take()) is not None:
            call.cancel()


class PromptCall(AsyncIterator[prefill_pb2.PrefillEvent]):
    """One request on an open call. Has what a call to Prefill has, as far as a leg needs it."""

    def __init__(
        self,
        call: OpenCall,
        request: prefill_pb2.PrefillRequest,
        *,
        deadline: Deadline,
        anew: Callable[[], PrefillCall],
    ) -> None:
        """
        Args:
            anew: makes an ordinary call instead, if this one ends before the node has taken the request.
        """
        here = tracing.current.get()
        request.timeout_ms = convert.ms_to_pb(deadline.remaining_s())
        request.traceparent = "" if here is None else here.header
        self._call: OpenCall | PrefillCall = call
        self._open, self._request, self._anew = call, request, anew
        self._events: AsyncIterator[prefill_pb2.PrefillEvent] | None = None

    async def __anext__(self) -> prefill_pb2.PrefillEvent:
        if self._events is None:
            self._events = aiter(self._open)
            if await self._is_sent():
                with suppress(StopAsyncIteration):  # it ended well without a word: nobody read the request
                    return await anext(self._events)
            self._call = self._anew()
            self._events = aiter(self._call)
        return await anext(self._events)

    async def _is_sent(self) -> bool:
        try:
            await self._open.write(self._request)
        except (asyncio.InvalidStateError, aio.AioRpcError):
            # A drain, a death, a message too large: where this loop had not heard of it, gRPC says INTERNAL to them
            # all. The call made anew says which.
            return False
        return True

    def cancel(self) -> bool:
        return self._call.cancel()
