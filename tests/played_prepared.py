"""Prefill nodes that play a script and to which calls may be open before there are requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvrelay.prefill_node.prepared_calls import PreparedCalls
from kvrelay.proto.v1 import prefill_pb2, prefill_pb2_grpc


@dataclass
class WithPreparedCalls(prefill_pb2_grpc.PrefillNodeServicer):
    """Serves what comes over such a call like any other request."""

    prepared: PreparedCalls = field(default_factory=PreparedCalls)
    num_prepared: int = 0  # requests that came so

    async def PreparedPrefill(self, requests: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        request = await self.prepared.request(context)
        if request is not None:
            self.num_prepared += 1
            events: Any = self.Prefill(request, context)
            async with aclosing(events):
                async for event in events:
                    yield event
