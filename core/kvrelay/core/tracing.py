"""Which request a piece of work belongs to: W3C trace contexts that travel with calls, and spans of what was done.

A context is kept in a context variable, so it follows the tasks of a call. A finished span is a log record on LOGGER
at level DEBUG, with the span as its attribute `span`; `otel.export` sends such records to OpenTelemetry.
Source: W3C Trace Context (https://www.w3.org/TR/trace-context/), version 00.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

HEADER = "traceparent"
LOGGER = "kvrelay.trace"
_log = logging.getLogger(LOGGER)
_PATTERN = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NOBODY = ("0" * 32, "0" * 16)


@dataclass(frozen=True, slots=True)
class Trace:
    """One span's place in a trace: what a call carries."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    sampled: bool = True

    @classmethod
    def new(cls) -> Trace:
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    @classmethod
    def parse(cls, header: str) -> Trace | None:
        """Return what a `traceparent` says, or None when it says nothing valid."""
        found = _PATTERN.fullmatch(header)
        if found is None or found[1] == _NOBODY[0] or found[2] == _NOBODY[1]:
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & 1))

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    def child(self) -> Trace:
        return Trace(self.trace_id, secrets.token_hex(8), self.sampled)


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work that has ended."""

    name: str
    at: Trace
    parent: Trace | None
    request_id: str
    began_ns: int  # since the epoch
    ended_ns: int
    error: str  # empty = none


current: ContextVar[Trace | None] = ContextVar("trace", default=None)
request_id: ContextVar[str] = ContextVar("request_id", default="")


def incoming(metadata: Iterable[tuple[str, str | bytes]] | None) -> Trace | None:
    """Return the caller's place in a trace, out of a call's metadata."""
    value = next((value for key, value in metadata or () if key == HEADER), "")
    return Trace.parse(value) if isinstance(value, str) else None


def outgoing() -> tuple[tuple[str, str], ...]:
    """Return the metadata that a call takes along."""
    here = current.get()
    return () if here is None else ((HEADER, here.header),)


@contextmanager
def span(name: str, *, of: str, parent: Trace | None) -> Iterator[Trace]:
    """Do the work inside as one span of request `of`; without a parent it begins a trace."""
    here = parent.child() if parent else Trace.new()
    began_ns, error = time.time_ns(), ""
    before = current.get(), request_id.get()
    current.set(here)
    request_id.set(of)
    try:
        yield here
    except BaseException as err:
        error = type(err).__name__
        raise
    finally:
        # Not reset: a generator that nobody finished is closed in another task's context.
        current.set(before[0])
        request_id.set(before[1])
        if here.sampled:
            _report(Span(name, here, parent, of, began_ns, time.time_ns(), error))


@contextmanager
def about(request: str) -> Iterator[None]:
    """What is logged inside belongs to this request. For code that does not wait."""
    token = request_id.set(request)
    try:
        yield
    finally:
        request_id.reset(token)


def _report(done: Span) -> None:
    took_ms = (done.ended_ns - done.began_ns) / 1e6
    _log.debug("%s of request %s took %.1f ms", done.name, done.request_id, took_ms, extra={"span": done})
