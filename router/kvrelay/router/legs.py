"""The two streams of one attempt, merged into one queue: what prefill says, what decode says, and how each ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc
from grpc import aio

from kvrelay.core.errors import ServeError, Status, UnavailableError
from kvrelay.core.grpc_status import from_rpc_error
from kvrelay.core.types import Incarnation, Role
from kvrelay.proto.v1 import decode_pb2, prefill_pb2

# A failure of one leg soon makes the other fail too; waiting this long tells which one was the cause.
SECOND_FAILURE_S = 0.3

# A client that reads slowly leaves no more than this in the router; then its nodes are not listened to.
MAX_QUEUED = 256

log = logging.getLogger(__name__)

LegMessage = prefill_pb2.PrefillEvent | decode_pb2.DecodeEvent


class LegCall(AsyncIterable[LegMessage], Protocol):
    """A streaming call to a node."""

    def cancel(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class LegEnded:
    """A stream is over: cleanly, or with an error."""

    role: Role
    error: ServeError | None


class LegFailedError(ServeError):
    """An attempt failed. `cause` is what the client should hear; `culprits` are nodes that a retry avoids."""

    def __init__(self, cause: ServeError, culprits: frozenset[Incarnation]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.culprits = culprits


def why_failed(err: aio.AioRpcError, node: Incarnation) -> ServeError:
    """Return what a call to a node of an attempt failed of."""
    error = from_rpc_error(err, peer=str(node))
    if error.status is Status.CANCELLED:
        # Not by us, or its task would be cancelled: a server that stops ends its calls so, and another may serve.
        return UnavailableError(str(error))
    if err.code() is grpc.StatusCode.UNIMPLEMENTED:
        # Not the node that was chosen: its process, or one that took its address, is in the other role by now.
        return UnavailableError(str(error))
    return error


class Legs:
    """Owns the streams of one attempt. Use `next`; leave through `stop`."""

    def __init__(self, nodes: dict[Role, Incarnation]) -> None:
        self._nodes = nodes
        self._queue: asyncio.Queue[LegMessage | LegEnded] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_QUEUED)  # for messages; an end always has room
        self._tasks: dict[Role, asyncio.Task[None]] = {}
        self._ended: dict[Role, LegEnded] = {}

    def start(self, role: Role, call: LegCall) -> None:
        task = self._tasks[role] = asyncio.create_task(self._pump(role, call))
        task.add_done_callback(partial(self._on_pump_end, role, call))

    def lost(self, role: Role) -> None:
        """Say that a node no longer knows the request (from the lease keeper, on the event loop)."""
        self.failed(role, UnavailableError(f"{self._nodes[role]} no longer knows the request"))

    def failed(self, role: Role, error: ServeError) -> None:
        """Say that another call to a node of this attempt failed."""
        self._queue.put_nowait(LegEnded(role, error))

    async def next(self, timeout_s: float) -> LegMessage | None:
        """Return the next message, or None when none came in time or a leg ended cleanly.

        Raises:
            LegFailedError: a leg failed; the other one may still be running.
        """
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with a message.
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            return None
        if not isinstance(item, LegEnded):
            self._room.release()
            return item
        self._ended[item.role] = item
        if item.error is not None:
            raise await self._failure(item.role, item.error)
        return None

    def ended(self, role: Role) -> bool:
        return role in self._ended

    async def stop(self, role: Role) -> None:
        """Cancel one leg and wait until its call is gone."""
        task = self._tasks.pop(role, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop_all(self) -> None:
        """Cancel all legs and wait until their calls are gone; cancelled in between, it leaves none running."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self, role: Role, timeout_s: float) -> None:
        """Let one leg run to its own end, for a bounded time."""
        task = self._tasks.get(role)
        if task is not None:
            await asyncio.wait((task,), timeout=timeout_s)
        await self.stop(role)

    async def _pump(self, role: Role, call: LegCall) -> None:
        try:
            async for message in call:
                await self._room.acquire()
                self._queue.put_nowait(message)
            self._queue.put_nowait(LegEnded(role, None))
        except aio.AioRpcError as err:
            self._queue.put_nowait(LegEnded(role, why_failed(err, self._nodes[role])))

    def _on_pump_end(self, role: Role, call: LegCall, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            # gRPC does not do so by itself for a pump that had not begun, or that a node's first word was waking.
            call.cancel()
        elif (bug := pump.exception()) is not None:
            log.error("the stream from %s ends by a bug", self._nodes[role], exc_info=bug)
            self._queue.put_nowait(LegEnded(role, ServeError(f"stream from {self._nodes[role]}: {bug!r}")))

    async def _failure(self, role: Role, error: ServeError) -> LegFailedError:
        errors = {role: error}
        others = [task for other, task in self._tasks.items() if other is not role]
        if others and error.retry_elsewhere:
            await asyncio.wait(others, timeout=SECOND_FAILURE_S)
            while not self._queue.empty():
                item = self._queue.get_nowait()
                if isinstance(item, LegEnded) and item.error is not None:
                    errors.setdefault(item.role, item.error)
        # A broken connection is a cause; an error that a node could still report is usually a consequence.
        broken = {failed for failed, err in errors.items() if isinstance(err, UnavailableError)}
        blamed = [failed for failed in errors if not broken or failed in broken]
        cause = errors[blamed[0]]
        return LegFailedError(cause, frozenset(self._nodes[failed] for failed in blamed))
