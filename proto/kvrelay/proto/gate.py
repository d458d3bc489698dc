"""Who may call: a check in front of every method of a server, that counts what it refuses and logs it once."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from kvrelay.proto import tls
from kvrelay.proto.handshakes import Handshakes

_MAX_LOGGED = 1000
_OPEN = ("/grpc.health.v1.",)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str  # one word, for counters
    code: grpc.StatusCode
    text: str


Check = Callable[[str, "aio.ServicerContext[Any, Any]"], Refusal | None]  # method name with its slashes, call


class Gate(aio.ServerInterceptor):
    """Asks `check` before each call except health checks, and tells `handshakes` of every call."""

    def __init__(
        self, check: Check, *, on_refused: Callable[[str], None], handshakes: Handshakes | None = None
    ) -> None:
        self._check = check
        self._handshakes = handshakes
        self._on_refused = on_refused
        self._logged: set[tuple[str, str]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        kind = {
            (False, False): "unary_unary",
            (False, True): "unary_stream",
            (True, False): "stream_unary",
            (True, True): "stream_stream",
        }[handler.request_streaming, handler.response_streaming]
        return handler._replace(**{kind: self._guarded(method, getattr(handler, kind))})  # type: ignore[no-any-return]

    def _guarded(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
                await self._admit(method, context)
                async with aclosing(behaviour(request, context)) as messages:
                    async for message in messages:
                        yield message

            return stream

        async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            await self._admit(method, context)
            return await behaviour(request, context)

        return call

    async def _admit(self, method: str, context: aio.ServicerContext[Any, Any]) -> None:
        if self._handshakes is not None:
            self._handshakes.called(context.peer())
        refusal = None if method.startswith(_OPEN) else self._check(method, context)
        if refusal is None:
            return
        self._on_refused(refusal.reason)
        seen = refusal.reason, context.peer().rpartition(":")[0]
        if seen not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(seen)
            log.warning("refused %s from %s: %s (said once)", method, seen[1], refusal.text)
        await context.abort(refusal.code, refusal.text)


def members_only(method: str, context: aio.ServicerContext[Any, Any]) -> Refusal | None:
    """Let in members of the fleet: for nodes, whose only callers are routers and other nodes."""
    if tls.is_member(context.auth_context()):
        return None
    return Refusal("certificate", grpc.StatusCode.PERMISSION_DENIED, "only members of the fleet may call a node")
