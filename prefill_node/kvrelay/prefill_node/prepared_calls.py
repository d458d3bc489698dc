"""Calls that were opened before there is a request for them; most of the time one per router waits here."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc import aio

from kvrelay.proto.v1 import prefill_pb2


class PreparedCalls:
    """Those that wait. To be used from one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def request(self, context: aio.ServicerContext[Any, Any]) -> prefill_pb2.PrefillRequest | None:
        """Wait for the request of the call that this task serves; None when there will be none."""
        task = asyncio.current_task()
        assert task is not None, "a call is served by a task"
        self._waiting.add(task)
        try:
            message = await context.read()
        except asyncio.CancelledError:
            if task in self._ended:
                return None
            raise
        finally:
            self._waiting.discard(task)
            self._ended.discard(task)
        return message if isinstance(message, prefill_pb2.PrefillRequest) else None  # else its caller has closed it

    def end(self) -> None:
        """End all of them, as calls that went well."""
        for task in self._waiting:
            self._ended.add(task)
            task.cancel()
