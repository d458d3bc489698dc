"""Spans to OpenTelemetry. Needs the extra `otel`; exporters are packages of their own, found by their entry points."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from kvrelay.core import tracing
from kvrelay.core.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

_GROUP = "opentelemetry_traces_exporter"


class SpanHandler(logging.Handler):
    """Hands finished spans to a span processor."""

    def __init__(self, processor: SpanProcessor, *, service: str) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra

        super().__init__()
        self._processor = processor
        self._resource = Resource.create({"service.name": "kvrelay", "service.instance.id": service})

    def emit(self, record: logging.LogRecord) -> None:
        done = getattr(record, "span", None)
        if isinstance(done, tracing.Span):
            self._processor.on_end(self._readable(done))

    def close(self) -> None:
        self._processor.shutdown()
        super().close()

    def _readable(self, done: tracing.Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags  # noqa: PLC0415

        def context(at: tracing.Trace, *, remote: bool) -> SpanContext:
            return SpanContext(
                int(at.trace_id, 16), int(at.span_id, 16), is_remote=remote,
                trace_flags=TraceFlags(TraceFlags.SAMPLED if at.sampled else TraceFlags.DEFAULT),
            )  # fmt: skip

        return ReadableSpan(
            done.name,
            context=context(done.at, remote=False),
            parent=context(done.parent, remote=True) if done.parent else None,
            resource=self._resource,
            attributes={"kvrelay.request_id": done.request_id},
            status=Status(StatusCode.ERROR, done.error) if done.error else Status(StatusCode.UNSET),
            start_time=done.began_ns,
            end_time=done.ended_ns,
            instrumentation_scope=InstrumentationScope("kvrelay"),
        )


def export(exporter: str, *, service: str) -> None:
    """Send all spans of this process to an installed exporter; it reads its own OTEL_* variables.

    Args:
        exporter: name of its entry point, such as `otlp_proto_grpc` or `console`; empty = export nothing.
        service: name of this process.

    Raises:
        SettingsError: there is no such exporter, or OpenTelemetry is not installed.
    """
    if not exporter:
        return
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as err:
        raise SettingsError("trace_exporter is set, OpenTelemetry is not installed: kvrelay[otel]") from err
    found = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if exporter not in found:
        raise SettingsError(f"no span exporter {exporter!r} is installed; there are {', '.join(sorted(found))}")
    log = logging.getLogger(tracing.LOGGER)
    log.propagate = log.isEnabledFor(logging.DEBUG)  # what is only for the exporter is not for the log as well
    log.setLevel(logging.DEBUG)
    log.addHandler(SpanHandler(BatchSpanProcessor(found[exporter].load()()), service=service))
