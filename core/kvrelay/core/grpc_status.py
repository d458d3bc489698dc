"""The one place where expected errors become gRPC statuses, and back. The only module of core that knows gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio

from kvrelay.core.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    QuotaError,
    RequestCancelledError,
    ServeError,
    Status,
    UnavailableError,
)

RETRY_KEY = "retry-elsewhere"
RETRY_AFTER_KEY = "retry-after-ms"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"  # gRPC clients with a retry policy wait this long by themselves
_MOST_BYTES = 2048  # of an error's text: gRPC writes up to three per byte into trailers that clients refuse from 8 KiB
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class RemoteError(ServeError):
    """A peer answered with a status; keeps the peer's code, text and its word on retrying."""

    def __init__(self, code: Status, message: str, *, retry_elsewhere: bool) -> None:
        super().__init__(message)
        self.status = code  # type: ignore[misc]
        self.retry_elsewhere = retry_elsewhere  # type: ignore[misc]


@asynccontextmanager
async def grpc_status(context: aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn a ServeError raised inside into an abort of this call with the error's status."""
    try:
        yield
    except ServeError as err:
        context.set_trailing_metadata((*_retry_hints(err), (RETRY_KEY, str(int(err.retry_elsewhere)))))
        await context.abort(_BY_NUMBER[err.status.value], _shortened(str(err)))


def _shortened(text: str) -> str:
    """Leave out the middle of a long text: it may quote what a client sent, and a client that refuses it sees
    RESOURCE_EXHAUSTED instead of the status."""
    sent = text.encode(errors="replace")
    if len(sent) <= _MOST_BYTES:
        return text
    half = _MOST_BYTES // 2
    start, end = sent[:half].decode(errors="ignore"), sent[-half:].decode(errors="ignore")
    return f"{start} [... {len(sent)} bytes in all ...] {end}"


def _retry_hints(err: ServeError) -> tuple[tuple[str, str], ...]:
    if not isinstance(err, OverloadedError | QuotaError):
        return ()
    after_ms = str(max(1, round(err.retry_after_s * 1e3)))
    return (RETRY_AFTER_KEY, after_ms), (_PUSHBACK_KEY, after_ms)


def from_rpc_error(err: aio.AioRpcError, *, peer: str) -> ServeError:
    """Return the ServeError that a failed call to `peer` stands for."""
    code, text = err.code(), f"{peer}: {err.details() or err.code().name}"
    if code is grpc.StatusCode.UNAVAILABLE and not _said_retry(err):
        return UnavailableError(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(text)
    if code is grpc.StatusCode.CANCELLED:
        return RequestCancelledError(text)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(text)
    known = {status.value for status in Status}
    number = code.value[0]
    status = Status(number) if number in known else Status.UNKNOWN
    return RemoteError(status, text, retry_elsewhere=_said_retry(err) == "1")


def _said_retry(err: aio.AioRpcError) -> str | None:
    metadata: Sequence[tuple[str, Any]] = tuple(err.trailing_metadata() or ())
    return next((str(value) for key, value in metadata if key == RETRY_KEY), None)
